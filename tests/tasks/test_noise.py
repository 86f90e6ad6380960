"""Noise schedules and samplers: identities between x_0, noise and velocity, and perfect predictions that lead back."""

import math

import pytest
import torch

from baoc.errors import BadInputError
from baoc.tasks.noise import NoiseSchedule
from baoc.tasks.sampling import sample, spaced_timesteps

GENERATOR = torch.Generator().manual_seed(0)
CLEAN = torch.rand(6, 1, 4, 4, generator=GENERATOR) * 2 - 1
NOISE = torch.randn(6, 1, 4, 4, generator=GENERATOR)
TIMESTEPS = torch.tensor([0, 1, 250, 500, 750, 990])


def test_cosine_leaves_what_the_paper_says():
    bars = NoiseSchedule("cosine").alpha_bars
    left = [math.cos(((t + 1) / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in (0, 499, 900)]
    start = math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    assert bars[[0, 499, 900]].tolist() == pytest.approx([value / start for value in left], rel=1e-9)
    assert 0 < bars[-1] < 1e-7  # betas of at most .999 keep the last step from dividing by 0


def test_linear_is_the_product_of_one_minus_beta():
    schedule = NoiseSchedule("linear")
    expected, product = [], 1.0
    for step in range(1000):
        product *= 1 - (1e-4 + (0.02 - 1e-4) * step / 999)
        expected.append(product)
    assert schedule.alpha_bars.tolist() == pytest.approx(expected, rel=1e-9)
    assert NoiseSchedule("linear", num_steps=100).alpha_bars[-1] == pytest.approx(
        float(schedule.alpha_bars[-1]), abs=1e-4
    )


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_every_prediction_gives_clean_images_and_noise_back(name):
    schedule = NoiseSchedule(name)
    noisy = schedule.add_noise(CLEAN, NOISE, TIMESTEPS)
    velocity = schedule.velocity(CLEAN, NOISE, TIMESTEPS)
    for prediction, predicted in (("epsilon", NOISE), ("v", velocity)):
        clean, noise = schedule.split(noisy, predicted, TIMESTEPS, prediction=prediction)
        torch.testing.assert_close(clean, CLEAN, atol=2e-4, rtol=0)
        torch.testing.assert_close(noise, NOISE, atol=1e-5, rtol=0)


def test_noisy_images_keep_the_dtype_of_clean_ones():
    assert NoiseSchedule().add_noise(CLEAN.bfloat16(), NOISE, TIMESTEPS).dtype is torch.bfloat16


def test_spaced_timesteps_go_from_the_noisiest_to_zero():
    assert spaced_timesteps(1000, num_steps=5) == [999, 749, 500, 250, 0]
    assert spaced_timesteps(1000, num_steps=1) == [999]
    assert spaced_timesteps(3, num_steps=50) == [2, 1, 0]


class Perfect:
    """Knows the clean image of each label and tells what noise (or velocity) lies over it."""

    def __init__(self, schedule, *, prediction):
        self.schedule, self.prediction, self.calls = schedule, prediction, 0

    def __call__(self, noisy, timesteps, labels):
        self.calls += 1
        a, s = self.schedule.signal_and_noise(timesteps)
        noise = (noisy - a * CLEAN[labels]) / s
        return noise if self.prediction == "epsilon" else self.schedule.velocity(CLEAN[labels], noise, timesteps)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_perfect_predictions_lead_back_to_the_images(sampler, prediction, name):
    schedule = NoiseSchedule(name)
    images = sample(
        Perfect(schedule, prediction=prediction),
        torch.arange(6),
        shape=(1, 4, 4),
        schedule=schedule,
        prediction=prediction,
        sampler=sampler,
        num_steps=20,
        generator=torch.Generator().manual_seed(1),
    )
    torch.testing.assert_close(images, CLEAN, atol=1e-3, rtol=0)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_best_predictor_of_a_normal_distribution_samples_that_distribution(sampler):
    """Where x_0 is normal of deviation .5, E[e | x_t] = s x_t / (.25 a^2 + s^2): no clean image is known to it."""
    schedule = NoiseSchedule()

    def expected(noisy, timesteps, labels):
        a, s = schedule.signal_and_noise(timesteps)
        return s * noisy / (0.25 * a.square() + s.square())

    images = sample(
        expected,
        torch.zeros(2000, dtype=torch.int64),
        shape=(1, 1, 1),
        schedule=schedule,
        sampler=sampler,
        num_steps=120,
        clip=False,
        generator=torch.Generator().manual_seed(1),
    )
    assert images.mean().abs() < 0.04
    assert images.std() == pytest.approx(0.5, abs=0.03)


def test_guidance_extrapolates_from_the_prediction_without_a_label():
    """Both predictors are perfect, of a and b: guided by g, the result is b + g (a - b)."""
    schedule = NoiseSchedule("linear")
    perfect = Perfect(schedule, prediction="epsilon")
    labels = torch.tensor([1, 2])
    common = {"shape": (1, 4, 4), "schedule": schedule, "num_steps": 10, "clip": False, "null_label": 0}
    images = sample(perfect, labels, guidance=1.5, generator=torch.Generator().manual_seed(1), **common)
    torch.testing.assert_close(images, CLEAN[:1] + 1.5 * (CLEAN[labels] - CLEAN[:1]), atol=1e-2, rtol=0)
    assert perfect.calls == 20
    sample(perfect, labels, guidance=1.0, generator=torch.Generator().manual_seed(1), **common)
    assert perfect.calls == 30, "without guidance one forward per step is enough"


def test_clip_holds_images_inside_the_range_of_the_data():
    schedule = NoiseSchedule()
    for clip, limit in ((True, 1.0), (False, 1.5)):
        images = sample(
            lambda noisy, timesteps, labels: -noisy,
            torch.zeros(8, dtype=torch.int64),
            shape=(1, 4, 4),
            schedule=schedule,
            num_steps=10,
            clip=clip,
            generator=torch.Generator().manual_seed(1),
        )
        assert (images.abs().max() <= limit) == clip


def test_sampling_draws_from_its_own_generator():
    schedule, before = NoiseSchedule(), torch.get_rng_state()
    for sampler in ("ddim", "ddpm"):
        one, other = (
            sample(
                lambda noisy, timesteps, labels: 0.1 * noisy,
                torch.zeros(2, dtype=torch.int64),
                shape=(1, 4, 4),
                schedule=schedule,
                sampler=sampler,
                num_steps=4,
                generator=torch.Generator().manual_seed(1),
            )
            for _ in range(2)
        )
        assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_schedule_is_refused():
    with pytest.raises(BadInputError, match=r"no noise schedule 'cosin' \(did you mean cosine\?\)"):
        NoiseSchedule("cosin")
