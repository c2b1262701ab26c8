// Byte dot products with DotProd: one instruction multiplies 16 bytes of a quantized digest.
#include "dots_neon.h"

extern "C" const ByteKernels hb_neon_dotprod_bytes = {byte_dots<Dots>, byte_heads<Dots>};
