"""CPU platform for SGLang without sgl_kernel; with ``--attention-backend hybrid`` its token pool is the host pool.

SGLang's plain CPU device needs sgl_kernel's CPU build, which no package offers. An out-of-tree platform runs every
operator in torch instead, so that stock backends (torch_native) can be served on it too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from hybrid_backend.engines.cpu_defaults import float32_line, has_bf16
from hybrid_backend.engines.sglang.checks import check_arguments
from hybrid_backend.engines.sglang.settings import chosen, config_of
from hybrid_backend.host_memory import System

if TYPE_CHECKING:
    from hybrid_backend.engines.sglang.pool import HostTokenPool

MAX_RUNNING_REQUESTS = 64
"""Default of ``--max-running-requests``: SGLang's own, at least 2048, would reserve frames for each request."""


class HybridCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU platform. Its capabilities stay at their defaults: no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set defaults and refuse what cannot work, while SGLang resolves its arguments and before any process."""
        if not chosen(server_args):
            return
        config = config_of(server_args)
        if server_args.page_size is None:
            server_args.page_size = config.page_size
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        server_args.sleep_on_idle = True  # The CPU is the device: an idle scheduler must not keep a core busy.
        if server_args.dtype == "auto" and not has_bf16():
            _choose_dtype(server_args)
        check_arguments(server_args, config)

    def get_device(self, device_id: int | None = 0) -> str:
        """Return the name of the device, which ``sglang.srt.utils.get_device`` passes on."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_kv_pool_cls(self, *, kind: str) -> type[HostTokenPool] | None:
        """Return the host pool's class if the user chose our backend, None for SGLang's own."""
        from sglang.srt.arg_groups.overrides import resolved_view
        from sglang.srt.runtime_context import get_exec, get_server_args

        if kind != "mha" or not chosen(get_exec().kernel):
            return None
        from hybrid_backend.engines.sglang.pool import HostTokenPool, Int8HostTokenPool

        is_int8 = config_of(resolved_view(get_server_args())).kv_dtype == "int8"
        return Int8HostTokenPool if is_int8 else HostTokenPool


def _choose_dtype(server_args: Any) -> None:
    """Choose fp32 if bf16 would be emulated."""
    import torch
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(getattr(server_args, "_cfg", server_args))
    line = float32_line(model, str(model.model_path), System().available())
    if line is not None:
        server_args.dtype = "float32"
        model.dtype = torch.float32  # SGLang has read the configuration before, and does not read it again.
        logging.getLogger(__name__).warning(line)
