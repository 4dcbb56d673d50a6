"""What holds for every test."""

from __future__ import annotations

import signal

from hypothesis import settings

from tests.helpers.forked import fork_context

# A shell starts background jobs with SIGINT ignored, and children inherit that; the tests that interrupt a command need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test that takes the fork server without our context must not leave all later ones a server that has imported nothing.
fork_context()

# Hypothesis would fail an example that a busy machine held up for 200 ms.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
