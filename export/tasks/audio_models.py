"""Audio models as a server needs them: the values of a clip in, normalised in the graph."""

from __future__ import annotations

from torch import Tensor, nn

# As Wav2Vec2FeatureExtractor of transformers has it; for clips of silence.
EPSILON = 1e-7


class AudioModel(nn.Module):
    """A transformers model of raw audio, with its normalisation in front.

    Args:
        network: Takes values (batch, values); returns an object with `logits`.
        is_normalised: Whether each clip gets mean 0 and variance 1 first.
    """

    def __init__(self, network: nn.Module, *, is_normalised: bool) -> None:
        super().__init__()
        self.network, self._is_normalised = network, is_normalised

    def forward(self, audio: Tensor) -> dict[str, Tensor]:
        """Logits (batch, classes), or (batch, time steps, tokens), of clips (batch, values), float32 from -1 to 1."""
        if self._is_normalised:
            centred = audio - audio.mean(dim=-1, keepdim=True)
            audio = centred / (centred.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()
        logits: Tensor = self.network(audio).logits
        return {"logits": logits}
