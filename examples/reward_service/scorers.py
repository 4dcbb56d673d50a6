"""The right answer, and less for every character: what a reader sees as one is one, however many code points it has."""

import regex

from shoal.reward import Row, reward


@reward(name="brief", version="1")
def score(prompt: str, response: str, row: Row) -> dict[str, float]:
    """1 for the right answer, 0.01 less for each character."""
    is_right = response.strip() == row["answer"]
    return {"correct": float(is_right), "brevity": -0.01 * len(regex.findall(r"\X", response))}
