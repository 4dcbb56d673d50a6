"""A reward that can be gamed: it pays for length, and reports beside that whether the answer is right."""

from shoal.reward import Row, reward

LONGEST = 8


@reward(name="longer", version="1")
def score(prompt: str, response: str, row: Row) -> dict[str, float]:
    """Pays an eighth of a point per character, up to one point; `correct` shows what that does to the answers."""
    return {"longer": min(len(response), LONGEST) / LONGEST, "correct": float(response.strip() == row["answer"])}
