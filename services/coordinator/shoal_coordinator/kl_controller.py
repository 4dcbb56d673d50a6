"""The KL coefficients from step to step: fixed, or in proportion to the distance of the KL from its target."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.algo.steering import adapted_kl_coef
from shoal.config.algorithm import AlgorithmSection
from shoal.telemetry.logs import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCoefficients:
    """Weights of the KL in the reward and in the loss; 0 for a term that is off. Plain state for checkpoints."""

    kl_coef: float
    kl_loss_coef: float


class KlController:
    """Holds the coefficients of the next step.

    Args:
        algorithm: which terms are on, where they start, target and horizon.
        restored: where an adaptive controller goes on; a fixed one keeps to its settings.
    """

    def __init__(self, algorithm: AlgorithmSection, restored: KlCoefficients | None = None) -> None:
        self._algorithm = algorithm
        configured = KlCoefficients(
            kl_coef=algorithm.kl_coef if algorithm.kl_in_reward else 0.0,
            kl_loss_coef=algorithm.kl_loss_coef if algorithm.kl_in_loss else 0.0,
        )
        self.coefficients = configured if restored is None or not self._is_adaptive else restored

    def after(self, kl_per_response: float | None, num_samples: int) -> KlCoefficients:
        """The coefficients after a step; changes nothing, assign them to `coefficients` once the step has committed.

        Args:
            kl_per_response: mean over responses of the KL summed over their tokens, in nats; None: the step had no trained response.
            num_samples: samples of the step.
        """
        target = self._algorithm.kl_target
        if not self._is_adaptive or target is None:
            return self.coefficients
        if kl_per_response is None or not math.isfinite(kl_per_response):
            log.warning("kl_controller_skips_step", kl_per_response=kl_per_response, reason="the actor reported no finite KL")
            return self.coefficients

        def adapt(coefficient: float) -> float:
            return adapted_kl_coef(
                coefficient,
                current_kl=kl_per_response,
                target_kl=target,
                num_samples=num_samples,
                horizon=self._algorithm.kl_horizon,
            )

        now = self.coefficients
        return KlCoefficients(kl_coef=adapt(now.kl_coef), kl_loss_coef=adapt(now.kl_loss_coef))

    @property
    def _is_adaptive(self) -> bool:
        return self._algorithm.has_reference and self._algorithm.kl_controller == "adaptive"
