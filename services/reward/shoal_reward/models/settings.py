"""What a reward model reads and what becomes of its output."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.config.base import Section
from shoal_reward.remote.settings import EndpointSection


class OutputSection(Section):
    """What is taken of a model's output: a logit as it is, no sigmoid, no softmax."""

    label: int | str | None = None
    """Output that is the score, by place or by its name in config.json; may be left out if the model has one."""
    per_token: bool = False
    """Whether each response token gets a value of its own: the output behind that token. The model must share the policy's tokenizer."""
    scale: float = 1.0
    """The score is scale x output + shift."""
    shift: float = 0.0
    """See scale."""


class ReadingSection(OutputSection):
    """How prompt and response become one input; all but max_text_chars are unused where per_token takes the policy's own ids."""

    input: Literal["chat", "text", "pair"] = "chat"
    """chat: messages through the model's template. text: prompt, separator, response. pair: two texts, as for BERT."""
    messages_key: str | None = None
    """Column with the prompt's chat messages; None: `prompt` or `messages` if the row has a list there, else one message of the user."""
    separator: str = ""
    """Put between prompt and response of input: text."""
    max_text_chars: int = Field(default=1_000_000, ge=1)
    """A sample with more characters is an error."""


class ModelSection(ReadingSection):
    """A Hugging Face model with a classification head, in this process."""

    model: str
    """Folder, or id in the local cache; weights as safetensors."""
    revision: str | None = None
    """Revision of an id."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and arithmetic; the 16-bit ones round scores to two or three digits, which makes ties within groups."""
    append_eos: bool = False
    """Whether input: text ends with the end token, as many models were trained."""
    max_tokens: int | None = Field(default=None, ge=8)
    """Input tokens at most; None: what model and tokenizer allow."""
    overlong: Literal["refuse", "truncate_left"] = "refuse"
    """Longer input: an error of the sample, or its first tokens go (for pair and per_token, the prompt's); a first BOS or CLS stays."""
    max_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens of one forward pass, padding included; a longer sample goes alone."""
    max_batch_samples: int = Field(default=256, ge=1)
    """Samples of one forward pass."""
    policy_tokenizer: str | None = None
    """Folder with the policy's tokenizer, which that of the model must equal; needed by per_token."""

    @model_validator(mode="after")
    def _check_tokenizer_is_known(self) -> ModelSection:
        if self.per_token and self.policy_tokenizer is None:
            raise ValueError(
                "per_token reads the policy's ids: name the policy's folder in policy_tokenizer, so that its ids can be compared"
            )
        if self.append_eos and self.input != "text":
            raise ValueError(f"append_eos goes with input: text, not {self.input}: leave it out, a template decides by itself")
        return self


class ModelServerSection(EndpointSection, ReadingSection):
    """A reward model on a vLLM server that was started with --runner pooling."""

    max_tokens: int | None = Field(default=None, ge=8)
    """The first tokens of a longer input are dropped by the server, BOS too; None: it refuses what is longer than it allows."""

    @model_validator(mode="after")
    def _check_input(self) -> ModelServerSection:
        if self.input == "pair":
            raise ValueError("a vLLM server takes no pairs here: use input: chat or text")
        if isinstance(self.label, str):
            raise ValueError(f"label is {self.label!r}, but a vLLM server does not say how its outputs are called: give the place, from 0")
        return self
