import pytest
import torch

from services.wm_server.sampler import SamplerConfig, sample, shifted_sigmas, window_noise
from tests.services.wm_server.conftest import make_model


def inputs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, 3, 2, 4, generator=generator), torch.rand(count, 61, 20, generator=generator)


@pytest.mark.parametrize("bucket", [1, 4])
@pytest.mark.parametrize("sigmas", [(1.0,), (1.0, 0.6)])
def test_a_sample_does_not_depend_on_its_companions(bucket, sigmas):
    config = SamplerConfig(sigmas=sigmas, batch_bucket=bucket)
    model = make_model().transformer
    condition, conditioning = inputs(6)
    seeds, chunks = [5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 0, 1]
    together = sample(model, config, condition, conditioning, seeds, chunks)
    for order in ([4], [2, 4, 0], [5, 4, 3, 2, 1]):
        apart = sample(
            model, config, condition[order], conditioning[order], [seeds[i] for i in order], [chunks[i] for i in order]
        )
        assert torch.equal(apart, together[order])


@pytest.mark.parametrize("bucket", [1, 4])
def test_anchors_and_memories_stay_with_their_samples(bucket):
    model, config = make_model(draft_width=8).transformer, SamplerConfig(batch_bucket=bucket)
    generator = torch.Generator().manual_seed(1)
    # One window six times: only anchors and memories differ.
    condition, conditioning = (values.expand(6, *values.shape[1:]) for values in inputs(1))
    anchors, memory = torch.rand(6, 3, 32, 64, generator=generator), torch.randn(6, 8, generator=generator)

    def drawn(anchor_of: list[int], memory_of: list[int]) -> torch.Tensor:
        count = len(anchor_of)
        shared = (condition[:count], conditioning[:count], [5] * count, [0] * count)
        return sample(model, config, *shared, anchors[anchor_of], memory[memory_of])

    first, order = [0] * 6, [4, 5, 0, 2, 1, 3]
    for given in ((order, first), (first, order), (order, order)):
        together = drawn(*given)
        for number in range(6):
            assert torch.equal(drawn(given[0][number:], given[1][number:])[0], together[number])
        assert len({sampled.numpy().tobytes() for sampled in together}) == 6


def test_noise_is_a_function_of_seed_and_chunk():
    noise = window_noise(3, 1, (2, 5))
    assert torch.equal(noise, window_noise(3, 1, (2, 5)))
    assert not torch.equal(noise, window_noise(3, 2, (2, 5)))
    assert not torch.equal(noise, window_noise(4, 1, (2, 5)))
    assert torch.equal(window_noise(2**63, 0, (1,)), window_noise(2**63, 0, (1,)))


@pytest.mark.parametrize(
    "changes",
    [{"sigmas": ()}, {"sigmas": (0.9,)}, {"sigmas": (1.0, 1.0)}, {"sigmas": (1.0, 0.0)}, {"history_noise": 1.0}, {"batch_bucket": 0}],
)  # fmt: skip
def test_senseless_settings_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        SamplerConfig(**changes)


def test_actions_and_history_reach_the_sample():
    model, config = make_model().transformer, SamplerConfig()
    condition, conditioning = inputs(1)
    first = sample(model, config, condition, conditioning, [0], [0])
    for changed in ((condition, conditioning.flip(1)), (condition.roll(1, 3), conditioning)):
        assert (sample(model, config, *changed, [0], [0]) - first).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("steps", "levels"),
    [(1, [1.0]), (2, [1.0, 5 / 6]), (4, [1.0, 15 / 16, 5 / 6, 5 / 8]), (8, [1.0, 35 / 36, 15 / 16, 25 / 28, 5 / 6, 3 / 4, 5 / 8, 5 / 12])],
)  # fmt: skip
def test_noise_levels_of_few_steps(steps, levels):
    assert shifted_sigmas(steps) == pytest.approx(levels)
    assert SamplerConfig(shifted_sigmas(steps)).sigmas[0] == 1.0
    with pytest.raises(ValueError, match="steps: expected at least 1"):
        shifted_sigmas(0)
