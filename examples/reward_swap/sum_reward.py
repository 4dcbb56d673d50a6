"""The reward that was meant: one point for the right sum."""

from shoal.reward import Row, reward


@reward(name="sum", version="1")
def score(prompt: str, response: str, row: Row) -> dict[str, float]:
    """1 for the right sum, else 0."""
    return {"correct": float(response.strip() == row["answer"])}
