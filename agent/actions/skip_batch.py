"""`skip_batch`: the pending update is not applied; parameters, moments and step counters stay.

Multiplying the update by 0 would be no veto: 0 x NaN is NaN.
"""

from typing import Any

import torch
from torch import Tensor


class Veto:
    """Keeps one `optimizer.step()` from changing anything, then puts everything back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._gradients: list[tuple[torch.nn.Parameter, Tensor | None]] = []
        self._found_inf: Tensor | None = None
        self._by_found_inf = False

    def arm(self) -> None:
        """Veto the step that is about to run.  Called in the step pre-hook."""
        if getattr(self._optimizer, "_step_supports_amp_scaling", False):
            # Fused torch kernels read found_inf on the device and leave everything as it is.
            self._found_inf = getattr(self._optimizer, "found_inf", None)
            self._by_found_inf = True
            device = self._optimizer.param_groups[0]["params"][0].device
            self._optimizer.found_inf = torch.ones((), dtype=torch.float32, device=device)
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._gradients.append((parameter, parameter.grad))
                parameter.grad = None  # optimizers pass over parameters without a gradient

    def disarm(self) -> None:
        """Put back what `arm` changed.  Called in the step post-hook; harmless when not armed."""
        if self._by_found_inf:
            if self._found_inf is None:
                del self._optimizer.found_inf
            else:
                self._optimizer.found_inf = self._found_inf
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients, self._found_inf, self._by_found_inf = [], None, False
