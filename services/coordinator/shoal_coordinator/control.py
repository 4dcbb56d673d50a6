"""What a user has asked of the run: pause, resume, stop. Requests take effect at step borders.

In the midst of a step or an evaluation the run pauses only by itself, with an alert; the user then resumes or stops it.
"""

from __future__ import annotations

import asyncio

from shoal.errors import StateError
from shoal_coordinator.alerts import AlertBoard, RunAlert, StoppedWhilePausedError
from shoal_coordinator.rest_models import Command
from shoal_coordinator.states import RunState, StateMachine


class RunControl:
    """Turns commands into two flags that the loop reads at step borders.

    Repeating a request is harmless; one that can no longer take effect raises.
    """

    def __init__(self, machine: StateMachine, alerts: AlertBoard | None = None) -> None:
        self._machine = machine
        self.alerts = AlertBoard() if alerts is None else alerts
        self._pause = False
        self._stop = False
        self._changed = asyncio.Event()

    @property
    def pause_requested(self) -> bool:
        """The run pauses, or is paused."""
        return self._pause

    @property
    def stop_requested(self) -> bool:
        """The run ends after the current step."""
        return self._stop

    def command(self, command: Command) -> None:
        """Take a request.

        Raises: StateError: it cannot take effect in this state.
        """
        self._refuse_impossible(command)
        if command is Command.STOP:
            self._stop, self._pause = True, False
        else:
            self._pause = command is Command.PAUSE
        self._changed.set()

    async def wait_while_paused(self) -> None:
        """At a step border: stay PAUSED as long as the user wants."""
        if not self._pause:
            return
        self._machine.go(RunState.PAUSED)
        await self._wait_until_resumed()

    async def wait_for_resume(self, alert: RunAlert) -> None:
        """Show an alert and stay PAUSED until the user resumes the run; then be in the same state as before.

        Raises: StoppedWhilePausedError: the user stops the run instead, or has done so before.
        """
        state = self._machine.state
        self.alerts.show(alert)
        self._machine.go(RunState.PAUSED)
        self._pause = not self._stop
        try:
            await self._wait_until_resumed()
        finally:
            self.alerts.clear()
        if self._stop:
            raise StoppedWhilePausedError(f"the run was stopped while it waited for attention: {alert.what}")
        self._machine.go(state)

    async def wait_for_stop(self) -> None:
        """Return once a stop is requested."""
        while not self._stop:
            self._changed.clear()
            await self._changed.wait()

    async def _wait_until_resumed(self) -> None:
        while self._pause:
            self._changed.clear()
            await self._changed.wait()

    def _refuse_impossible(self, command: Command) -> None:
        state = self._machine.state
        if self._machine.is_terminal or state is RunState.FINISHING:
            raise StateError(f"cannot {command} a run that is {state}")
        if command is Command.RESUME and not self._pause:
            raise StateError(f"cannot resume a run that is not paused (it is {state})")
        if command is Command.PAUSE and self._stop:
            raise StateError("cannot pause a run that is stopping after the current step")
