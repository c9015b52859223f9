"""Power laws: exact on exact data, intervals that hold, and the paper's own factor from the paper's own fits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from depthmix.cli.scaling import print_scaling
from depthmix.studies.comparison import Run
from depthmix.studies.page import Provenance
from depthmix.studies.scaling import Factor, Law, compute_equivalent, factor_between, fit, verdict_of
from depthmix.studies.scaling_page import Point, draw_scaling, fit_scaling, render

COMPUTE = [1e15, 4e15, 1.6e16, 6.4e16, 2.56e17]


def test_the_papers_fits_give_the_papers_factor() -> None:
    """arXiv 2603.15031: 1.891 C^-0.057 and 1.870 C^-0.058 (PFLOP/s-days) are 1.714 and 1.692 at 5.6: 1.25 times."""
    base, block = Law(a=1.891, b=0.057), Law(a=1.870, b=0.058)
    assert base.loss(5.6) == pytest.approx(1.714, abs=5e-4)
    assert block.loss(5.6) == pytest.approx(1.692, abs=5e-4)
    factor = compute_equivalent(block, base, 5.6)
    assert factor is not None
    assert round(factor, 2) == 1.25


def test_the_papers_table_is_within_our_intervals_of_the_papers_laws() -> None:
    """Table 2 does not tell the compute: 6 FLOPs for each active parameter and token stand in for it."""
    parameters, tokens = [194e6, 241e6, 296e6, 436e6, 528e6], [38.7e9, 45.4e9, 62.1e9, 87.9e9, 119e9]
    compute = [6 * n * d for n, d in zip(parameters, tokens, strict=True)]
    base = fit(compute, [1.931, 1.895, 1.829, 1.766, 1.719])
    block = fit(compute, [1.909, 1.875, 1.809, 1.746, 1.693])
    for found, printed in ((base, 0.057), (block, 0.058)):
        low, high = found.intervals["b"]
        assert low <= printed <= high
    factor = factor_between(block, base, compute[-1])
    assert factor.low is not None
    assert factor.high is not None
    assert 1 < factor.low <= 1.25 <= factor.high


@pytest.mark.parametrize("law", [Law(a=3, b=0.06, unit=1e16), Law(a=1.5, b=0.2, irreducible=1.2, unit=1e16)])
def test_exact_points_give_their_law_back(law: Law) -> None:
    found = fit(COMPUTE, [law.loss(c) for c in COMPUTE], irreducible=law.irreducible > 0).law
    assert found.b == pytest.approx(law.b, rel=1e-6)
    assert found.irreducible == pytest.approx(law.irreducible, rel=1e-6)
    for c in (1e14, 1e18):
        assert found.loss(c) == pytest.approx(law.loss(c), rel=1e-6)


def test_a_law_and_its_inverse_agree() -> None:
    law = Law(a=1.5, b=0.2, irreducible=1.2, unit=1e16)
    assert law.compute(law.loss(3e17)) == pytest.approx(3e17)
    assert law.compute(1.2) is None, "what is irreducible is never reached"
    assert compute_equivalent(Law(a=1, b=0.2), law, 1e18) is None


def test_intervals_hold_the_truth_95_times_in_100() -> None:
    """Noise in common to both arms of a size and noise of each: exponent and factor."""
    base, arm = Law(a=3.0, b=0.06, unit=1e16), Law(a=2.95, b=0.06, unit=1e16)
    truth = compute_equivalent(arm, base, COMPUTE[-1])
    assert truth is not None
    source, trials = np.random.default_rng(0), 300
    held = {"b": 0, "factor": 0}
    for _ in range(trials):
        shared, own = source.normal(0, 0.004, 5), source.normal(0, 0.002, (2, 5))
        fits = [
            fit(COMPUTE, [law.loss(c) * np.exp(shared[k] + own[i, k]) for k, c in enumerate(COMPUTE)])
            for i, law in enumerate((arm, base))
        ]
        low, high = fits[0].intervals["b"]
        held["b"] += low <= 0.06 <= high
        found = factor_between(*fits, COMPUTE[-1])
        assert found.low is not None
        assert found.high is not None
        held["factor"] += found.low <= truth <= found.high
    for name, count in held.items():
        assert 0.91 <= count / trials <= 0.985, name


def test_noise_that_both_arms_share_does_not_blur_the_factor() -> None:
    base, arm = Law(a=3.0, b=0.06, unit=1e16), Law(a=2.95, b=0.06, unit=1e16)
    source = np.random.default_rng(1)
    shared, other = source.normal(0, 0.01, (2, 5))

    def width(noise: np.ndarray) -> float:
        first = fit(COMPUTE, [arm.loss(c) * np.exp(n) for c, n in zip(COMPUTE, shared, strict=True)])
        second = fit(COMPUTE, [base.loss(c) * np.exp(n) for c, n in zip(COMPUTE, noise, strict=True)])
        found = factor_between(first, second, COMPUTE[-1])
        assert found.low is not None
        assert found.high is not None
        return found.high - found.low

    assert width(shared) < 0.2 * width(other)


def test_as_many_sizes_as_parameters_give_no_interval() -> None:
    two = fit(COMPUTE[:2], [3.0, 2.8])
    assert two.intervals == {}
    found = factor_between(fit(COMPUTE[:2], [2.9, 2.7]), two, COMPUTE[1])
    assert found.low is None
    verdict = verdict_of("arm", "base", found, "2 sizes, one seed each")
    assert "(2 sizes, one seed each: too few sizes for an interval)" in verdict


@pytest.mark.parametrize(
    ("compute", "losses", "words"),
    [
        ([1e15], [2.0], "1 compute values and 1 losses; expected at least 2"),
        ([1e15, 1e15], [2.0, 2.1], "at least 2 different sizes"),
        ([1e15, 2e15], [2.0, float("nan")], "finite"),
        ([1e15, 0.0], [2.0, 1.0], "above 0"),
    ],
)
def test_points_without_a_law_are_refused(compute: list[float], losses: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(compute, losses)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Factor(compute=1e18, factor=1.2, low=1.1, high=1.3), "worth 1.20 times the compute of base"),
        (Factor(compute=1e18, factor=1.2, low=0.9, high=1.5), "no difference from base was found"),
        (Factor(compute=1e18, factor=1.2, low=0.9), "no difference from base was found"),
        (Factor(compute=1e18, factor=1.2, low=1.1), "1.10 or more"),
        (Factor(compute=1e18, factor=None), "never reaches"),
    ],
)
def test_the_verdict_says_what_the_interval_allows(found: Factor, words: str) -> None:
    assert words in verdict_of("arm", "base", found, "2 sizes, one seed each")


def point(arm: str, size: str, compute: float, *losses: float) -> Point:
    runs = tuple(
        Run(
            arm=f"{arm} {size}",
            seed=k,
            tokens=(1e6,),
            seconds=(10.0,),
            losses=(loss,),
            flops=compute,
            tokens_per_second=1e5,
            memory_bytes=1e8,
            parameters=1000,
            lr=1e-3,
        )
        for k, loss in enumerate(losses)
    )
    return Point(arm=arm, size=size, runs=runs)


def test_arms_are_fitted_over_the_sizes_that_the_baseline_has(tmp_path: Path) -> None:
    base, arm = Law(a=3.0, b=0.06, unit=1e16), Law(a=2.9, b=0.06, unit=1e16)
    points = [
        point("residual", str(k), c, base.loss(c) + 0.001, base.loss(c) - 0.001) for k, c in enumerate(COMPUTE[:4])
    ]
    points += [point("attnres", str(k), c, arm.loss(c)) for k, c in enumerate(COMPUTE)]
    points += [point("short", "0", COMPUTE[0], 2.0)]
    found = fit_scaling(points)
    assert len(found.fits["attnres"].losses) == 4
    assert found.fits["residual"].law.b == pytest.approx(0.06, rel=1e-4)
    assert "short: no law" in found.notes[0]
    assert [f.compute for f in found.factors["attnres"]] == COMPUTE[:4]
    assert "attnres: worth 1.76 times the compute of residual" in found.verdicts[0]
    figures = draw_scaling(found, tmp_path / "figures")
    page = render(
        found, {}, Provenance(command="depthmix scaling", machine="a machine", data="stdlib"), figures, tmp_path
    )
    assert (tmp_path / "figures" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "![Loss against compute](figures/scaling.png)" in page
    assert page.count("| attnres |") == 1 + 4 + 5


@pytest.mark.parametrize("irreducible", [False, True])
def test_the_console_says_what_the_page_says(irreducible: bool, capsys: pytest.CaptureFixture[str]) -> None:
    base, arm = Law(a=3.0, b=0.06, unit=1e16), Law(a=2.9, b=0.06, unit=1e16)
    name = "hyper_connections+depth_attention"
    points = [point("residual", str(k), c, base.loss(c) + 0.001 * (-1) ** k) for k, c in enumerate(COMPUTE)]
    points += [point(name, str(k), c, arm.loss(c), arm.loss(c) + 0.001) for k, c in enumerate(COMPUTE)]
    found = fit_scaling(points, irreducible=irreducible)
    study = SimpleNamespace(failures={})
    print_scaling(found, study, Path("scaling.md"))  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    page = render(found, {}, Provenance(command="depthmix scaling", machine="a machine", data="stdlib"), {}, Path())
    for line in (found.verdicts[0], "Intervals show the scatter of these sizes around the laws"):
        assert line in page
        assert line in " ".join(out.split())
    assert "5 sizes, one seed each" in found.verdicts[0], "the fewest of any size"
    for f in found.fits.values():
        assert f"{f.law.b:.4f}" in out
        assert "{:.4f} to {:.4f}".format(*f.intervals["b"]) in out
    assert name in out, "not broken"


def test_the_factor_rests_on_the_sizes_that_both_have_and_the_verdict_on_the_largest() -> None:
    """The baseline bends at its last size, which the arm does not have; sizes come in any order."""
    base, arm = Law(a=3.0, b=0.06, unit=1e16), Law(a=2.9, b=0.06, unit=1e16)
    sizes = [*enumerate(COMPUTE)]
    points = [point("residual", str(k), c, base.loss(c) * (1.2 if k == 4 else 1)) for k, c in sizes[::-1]]
    points += [point("attnres", str(k), c, arm.loss(c)) for k, c in sizes[:4]]
    (verdict,) = fit_scaling(points).verdicts
    assert "worth 1.76 times the compute of residual at 6.4e+16 FLOPs" in verdict


def test_a_baseline_without_a_run_is_not_replaced_by_another_arm() -> None:
    points = [point("attnres", str(k), c, 3 * c**-0.01) for k, c in enumerate(COMPUTE)]
    found = fit_scaling(points, baseline="residual")
    assert "attnres" in found.fits
    assert (found.factors, found.verdicts) == ({}, [])
    assert "residual: no law" in found.notes[0]


def test_a_loss_that_does_not_fall_is_told() -> None:
    points = [point("residual", str(k), c, 2.0 + 0.01 * k) for k, c in enumerate(COMPUTE)]
    assert "does not fall with compute" in fit_scaling(points).notes[0]
