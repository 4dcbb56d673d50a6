"""Closed sets on the wire; UNSPECIFIED and unknown numbers are refused."""

from __future__ import annotations

from enum import StrEnum
from typing import Generic, TypeVar

from shoal.errors import CodecError
from shoal.rpc.v1 import common_pb2, registry_pb2, trainer_pb2, weights_pb2
from shoal.types import FinishReason, InflightMode, ScoreStatus, ServiceKind, TrainerRole

_Member = TypeVar("_Member", bound=StrEnum)
_Number = TypeVar("_Number", bound=int)


class _EnumCodec(Generic[_Member, _Number]):
    def __init__(self, what: str, numbers: dict[_Member, _Number]) -> None:
        self._what = what
        self._numbers = numbers
        self._members: dict[int, _Member] = {int(number): member for member, number in numbers.items()}

    def to_proto(self, member: _Member) -> _Number:
        """Return the wire number of a member."""
        return self._numbers[member]

    def from_proto(self, number: int) -> _Member:
        """Return the member of a wire number. Raises CodecError for UNSPECIFIED or an unknown one."""
        member = self._members.get(number)
        if member is None:
            raise CodecError(f"{self._what} {number} is unknown; the sender must set one of {', '.join(self._numbers)}")
        return member


finish_reason: _EnumCodec[FinishReason, common_pb2.FinishReason.ValueType] = _EnumCodec(
    "finish_reason",
    {
        FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
        FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
        FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    },
)
score_status: _EnumCodec[ScoreStatus, common_pb2.ScoreStatus.ValueType] = _EnumCodec(
    "score status",
    {
        ScoreStatus.SCORED: common_pb2.SCORE_STATUS_SCORED,
        ScoreStatus.NOT_SCORED: common_pb2.SCORE_STATUS_NOT_SCORED,
        ScoreStatus.ERROR: common_pb2.SCORE_STATUS_ERROR,
    },
)
service_kind: _EnumCodec[ServiceKind, registry_pb2.ServiceKind.ValueType] = _EnumCodec(
    "service kind",
    {
        ServiceKind.ROLLOUT: registry_pb2.SERVICE_KIND_ROLLOUT,
        ServiceKind.REWARD: registry_pb2.SERVICE_KIND_REWARD,
        ServiceKind.ACTOR: registry_pb2.SERVICE_KIND_ACTOR,
        ServiceKind.CRITIC: registry_pb2.SERVICE_KIND_CRITIC,
    },
)
trainer_role: _EnumCodec[TrainerRole, trainer_pb2.TrainerRole.ValueType] = _EnumCodec(
    "trainer role",
    {TrainerRole.ACTOR: trainer_pb2.TRAINER_ROLE_ACTOR, TrainerRole.CRITIC: trainer_pb2.TRAINER_ROLE_CRITIC},
)
inflight_mode: _EnumCodec[InflightMode, weights_pb2.InflightMode.ValueType] = _EnumCodec(
    "inflight mode",
    {
        InflightMode.KEEP: weights_pb2.INFLIGHT_MODE_KEEP,
        InflightMode.ABORT: weights_pb2.INFLIGHT_MODE_ABORT,
        InflightMode.WAIT: weights_pb2.INFLIGHT_MODE_WAIT,
    },
)
