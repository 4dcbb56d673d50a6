"""All checks of one reward server."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.conformance.probe import Endpoint, Probe
from shoal.conformance.report import ConformanceReport
from shoal.conformance.samples import choose_samples
from shoal.conformance.scorer_checks import LARGE_BATCH, ScorerChecks
from shoal.conformance.server_checks import check_description, check_unknown, choose_scorers
from shoal.types import ScoreSample


async def check_service(
    endpoint: Endpoint,
    *,
    wanted: Sequence[tuple[str, str]] = (),
    samples: Sequence[ScoreSample] = (),
    timeout_s: float,
    large_batch: int = LARGE_BATCH,
) -> ConformanceReport:
    """Check a reward server; whatever it does wrong becomes a failure in the report.

    Args:
        endpoint: the server.
        wanted: (scorer, version) to check, an empty version for all of its versions; nothing checks every scorer.
        samples: what to score, 16 at most are used; made ones if there are none, which not every scorer can score.
        timeout_s: deadline of each call, in seconds. About 20 calls are made for each scorer, fewer if it does not answer.
        large_batch: samples of the largest batch; fewer are sent to a scorer that could not do as many in time.
    """
    probe = Probe(endpoint=endpoint, timeout_s=timeout_s)
    checks, offered = await check_description(probe)
    chosen, missing = choose_scorers(offered, wanted)
    checks += missing
    if offered:
        checks += await check_unknown(probe, offered[0].name, choose_samples(samples, needs_token_ids=False))
    for scorer in chosen:
        versions = [other.version for other in offered if other.name == scorer.name]
        checks += await ScorerChecks(probe, scorer, samples, versions=versions, large_batch=large_batch).run()
    return ConformanceReport(checks=tuple(checks), scorers=offered)
