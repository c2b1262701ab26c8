"""The contract of the operations (`kernels.operations.Operations`), one module for each group of operations."""
