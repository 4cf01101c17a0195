"""What would be silently wrong is refused where it is made."""

import numpy as np
import pytest

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core import rewards
from treadle_trainer.core.aggregations.constant_length import ConstantLength
from treadle_trainer.core.corrections.gated import Gated
from treadle_trainer.core.corrections.icepop import IcePop
from treadle_trainer.core.corrections.mis import Mis
from treadle_trainer.core.corrections.tis import Tis
from treadle_trainer.core.kl import Kl
from treadle_trainer.core.losses.cispo import Cispo
from treadle_trainer.core.losses.gspo import Gspo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.objective import Objective


@pytest.mark.parametrize(
    ("make", "field"),
    [
        pytest.param(lambda: PpoClip(clip_low=0), "clip_low", id="no-clip"),
        pytest.param(lambda: PpoClip(clip_high=-0.1), "clip_high", id="clip-below-1"),
        pytest.param(lambda: PpoClip(dual_clip=0.9), "dual_clip", id="dual-clip"),
        pytest.param(lambda: Gspo(clip_low=1.5), "clip_low", id="gspo"),
        pytest.param(lambda: Cispo(0.2), "ceiling", id="an-offset-as-ceiling"),
        pytest.param(lambda: ConstantLength(0), "length", id="no-length"),
        pytest.param(lambda: Tis(0.0), "low", id="no-weight"),
        pytest.param(lambda: IcePop(5.0, 0.5), "low", id="bounds-turned-round"),
        pytest.param(lambda: Mis(float("nan"), 1.0), "low", id="a-bound-that-is-no-number"),
        pytest.param(lambda: Gated("seq", "clip", low=0.5), "mode", id="a-segment-is-no-weight"),
        pytest.param(lambda: Gated("geo", "mask", "tv"), "gate", id="geometric-divergence"),
        pytest.param(lambda: Gated("token", "trunc", "tv"), "mode", id="a-divergence-is-no-weight"),
        pytest.param(lambda: Gated("seq", "mask", "tv", 0.1, 0.2), "low", id="least-divergence"),
        pytest.param(lambda: Gated("token", "clip"), "low", id="clip-without-a-bound"),
        pytest.param(lambda: Gated("token", "trunc", high=None), "high", id="trunc-without"),
        pytest.param(lambda: Kl(0.1, "k1", "rollout"), "estimator", id="k1"),
        pytest.param(lambda: Kl(-0.1), "coefficient", id="less-than-nothing"),
        pytest.param(lambda: Objective(form="decoupled"), "correction", id="uncorrected"),
        pytest.param(lambda: Objective(correction=Tis()), "form", id="weighed-twice"),
        pytest.param(lambda: Objective(entropy_bonus=-1), "entropy_bonus", id="bonus"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, field):
    with pytest.raises(InvalidFieldError) as raised:
        make()
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda r: rewards.shape_overlong(r, r, max_tokens=10, buffer=11), "buffer"),
        (lambda r: rewards.shape_stop_properly(r, r > 0, coefficient=1.5), "coefficient"),
        (lambda r: rewards.clip(r, 1, -1), "clip_range"),
    ],
    ids=["buffer", "coefficient", "clip-range"],
)
def test_shaping_that_makes_no_sense_is_refused_by_name(make, field):
    with pytest.raises(InvalidFieldError) as raised:
        make(np.array([1.0, 0.0]))
    assert raised.value.field == field
