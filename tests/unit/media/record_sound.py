"""Records what transformers' feature extractor makes of sounds: `python -m tests.unit.media.record_sound`.

It needs a Python with transformers, which the tests do not.
"""

from pathlib import Path

import numpy as np

from runner.media.sound import spectra
from tests.unit.media.sounds import noise

RECORDED = Path(__file__).parent / "spectra.npz"
COUNTS = (161, 320, 321, 481, 1000, 4001)
"""Numbers of samples."""


def main() -> None:
    """Writes the recording, and says where ours differs."""
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    extractor, found = Gemma4AudioFeatureExtractor(), {}
    for count in (*COUNTS, 16_000, 30_001, 480_000):
        made = extractor([noise(count)])
        expected = np.asarray(made["input_features"][0])[np.asarray(made["input_features_mask"][0])]
        equal = np.array_equal(spectra(noise(count)), expected)
        print(f"{count:8} samples, {len(expected):5} spectra, {'equal' if equal else 'DIFFERENT'}")  # noqa: T201
        if count in COUNTS:
            found[str(count)] = expected
    np.savez_compressed(RECORDED, **found)


if __name__ == "__main__":
    main()
