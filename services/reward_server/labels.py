"""Which frames of a recorded episode show success, from the simulator's labels.

The simulator latches success: an episode succeeded when the rule held at one moment. The frame classifier reads single
frames, and a frame shows success only while the bottle is up. So a frame is a positive, a negative, or of unknown
class: not trained on directly, yet still one of the frames whose *peak* decides an episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

POSITIVE, NEGATIVE, UNKNOWN = 1, 0, -1
# Success is latched at any of 15 physics steps an action, frames are drawn after an action: the frames just before the
# first success look like it and are not it. Left out.
MARGIN_FRAMES = 2
# Where an episode ends without success after it had it (the bottle slipped), only these many frames are sure.
SURE_FRAMES = 3


def frame_labels(success: bool, length: int, metadata: Mapping[str, Any]) -> NDArray[np.int8]:
    """Labels int8 (length,) of frames 0 .. length - 1: POSITIVE, NEGATIVE or UNKNOWN.

    Args:
        success: the episode's latched ground truth.
        length: number of frames.
        metadata: the episode's. `first_success_action` (with `diagnostics.success_now`) dates the success to an action;
            `success_after_chunk` (one latched value a chunk) to a chunk; without either, the last quarter of the
            episode is of unknown class and the rest negative up to the first quarter.

    A failed episode is negative throughout.
    """
    labels = np.full(length, NEGATIVE, np.int8)
    if not success:
        return labels
    first = metadata.get("first_success_action")
    if isinstance(first, int) and first > 0:
        labels[max(first - MARGIN_FRAMES, 0) : first] = UNKNOWN
        still_up = metadata.get("diagnostics", {}).get("success_now", 0.0) > 0.5
        labels[first:] = POSITIVE if still_up else UNKNOWN
        labels[first : first + SURE_FRAMES] = POSITIVE
        return labels
    chunks = metadata.get("success_after_chunk")
    if isinstance(chunks, list) and True in chunks:
        chunk_frames = (length - 1) // len(chunks)
        labels[chunks.index(True) * chunk_frames + 1 - MARGIN_FRAMES :] = UNKNOWN
        return labels
    labels[(length - 1) // 4 :] = UNKNOWN
    return labels
