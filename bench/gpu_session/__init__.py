"""Measurements of one session on a GPU, each bounded in time, the most valuable first: ``python -m bench.gpu_session``.

`plan` lists the cases, `runner` runs each in a process of its own, `journal` has what came of them, `summary` shows it.
The other modules are the parts: `serve`, `prefill`, `traffic`, `decode`, `kernels`. `rehearsal` runs all of them on a
simulated GPU.
"""
