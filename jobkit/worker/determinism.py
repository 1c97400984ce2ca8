"""The YAML's `deterministic`: operations that give the same bits each time they are computed from the same."""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # of a size that does not vary, for each of cuBLAS' streams
    "NCCL_NVLS_ENABLE": "0",  # sums in the switch come in any order (github.com/NVIDIA/nccl/issues/1497)
}
"""What the libraries beside torch read when they are first used; one that is set stays."""


def set_variables(deterministic: bool | str, environment: MutableMapping[str, str]) -> None:
    """Put what `deterministic` needs into the environment of a process that has not used a GPU yet."""
    for name, value in VARIABLES.items() if deterministic else ():
        environment.setdefault(name, value)


def set_switches(deterministic: bool | str) -> None:
    """torch's and cuDNN's switches: `warn` goes on after an operation that has no deterministic form.

    Where `deterministic` is off nothing is changed: they may have been set by the user's code.
    (docs.pytorch.org/docs/stable/notes/randomness.html)
    """
    if not deterministic:
        return
    import torch  # here: a command's rank may never need it

    torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # the fastest of several by the clock: another one on another day
