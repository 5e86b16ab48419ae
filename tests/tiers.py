"""Which tests belong to which tier: `make test-quick`, `make test` and `make test-all`.

A test is in the middle tier unless a pattern below says otherwise. A pattern is a test function, or a test function and
its case as pytest prints them, with `*` for any text; one that begins with `!` takes tests out again. A pattern that
fits no test of its file is an error, so that the lists follow the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

# Left to `make test-all`: what differs from a case of `make test` only in the family, the plan, the sizes or the
# schedule; float32 repeats of what float64 proves; and long programs whose parts are tested by themselves.
CROSSINGS: dict[str, tuple[str, ...]] = {
    "test_accelerate.py": (
        "test_twenty_steps_equal_one_process[*",
        "!test_twenty_steps_equal_one_process[dp2xtp2+sp+zero1-float64]",
        "test_resume_goes_on_with_the_same_numbers[*",
        "!test_resume_goes_on_with_the_same_numbers[on twice the ranks]",
        "!test_resume_goes_on_with_the_same_numbers[to stage 3]",
    ),
    "test_accelerate_recipes.py": (
        "test_a_stock_schedule_ends_where_it_should[*",
        "!test_a_stock_schedule_ends_where_it_should[steps-activate-plan0]",
        "!test_a_stock_schedule_ends_where_it_should[epochs-launched-plan2]",
    ),
    "test_accelerate_script.py": ("test_accelerates_own_scripts_pass_on_our_runtime[test_sync]",),
    "test_construction.py": (
        "test_weights_and_a_step_equal_those_of_a_materialised_model[*",
        "!test_weights_and_a_step_equal_those_of_a_materialised_model[*-dp2xtp2+sp+zero1]",
        "test_a_rank_allocates_its_shard_only[*",
        "!test_a_rank_allocates_its_shard_only[checkpoint]",
    ),
    "test_deepspeed.py": ("test_the_example_runs_and_ends_well",),
    "test_demo.py": ("test_the_planner_picks_the_demo_s_plan", "test_a_plan_that_does_not_fit_is_one_clear_message"),
    "test_families.py": (
        "test_equals_one_device_as_the_page_says[*",
        "!test_equals_one_device_as_the_page_says[apertus and so on]",
        "test_variants[falcon*",
        "!test_variants[falcon, eager alibi]",
    ),
    "test_launch_hosts.py": ("test_a_lost_host_ends_the_other_with_an_error_that_names_it[killed]",),
    "test_optimizer_state.py": (
        "test_training_goes_on_exactly[*",
        "!test_training_goes_on_exactly[tp2+spxdp2+zero3-*",
        "!test_training_goes_on_exactly[*-tp2+spxdp2+zero3]",
        "!test_training_goes_on_exactly[dp2+zero1-tp2+sp]",
        "!test_training_goes_on_exactly[tp2+sp-dp2+zero1]",
    ),
    "test_parity.py": (
        "test_equals_one_process_in_float64[*",
        "!test_equals_one_process_in_float64[llama-*",
        "!test_equals_one_process_in_float64[*-dp2xtp2+sp+zero1]",
        "test_losses_equal_one_process_in_float32_over_20_steps[*",
    ),
    "test_placement.py": (
        "test_every_pair_on_one_axis[ProcessMesh([0, 1, 2, 3], *",
        "test_every_pair_on_two_axes[*",
        "!test_every_pair_on_two_axes[(7, 5)-1]",
        "test_every_pair_across_meshes[*",
        "!test_every_pair_across_meshes[ProcessMesh([2, 0], *",
        "!test_every_pair_across_meshes[ProcessMesh([[3, 1], *",
    ),
    "test_planner_footprint.py": (
        "test_estimate_and_trace[*",
        "!test_estimate_and_trace[gemma2-*",
    ),
    "test_random_programs.py": (
        "test_a_random_program_is_equal_or_told[*",
        *(f"!test_a_random_program_is_equal_or_told[{seed}]" for seed in range(8)),
    ),
    "test_spmd.py": (
        "test_nothing_is_found_in_a_family[*",
        "!test_nothing_is_found_in_a_family[llama-*",
        "!test_nothing_is_found_in_a_family[*-tp2+sp]",
    ),
    "test_tracing.py": (
        "test_a_trace_is_what_a_run_measures[*",
        "!test_a_trace_is_what_a_run_measures[gemma2-*",
    ),
    "test_trainer.py": (
        "test_20_steps_evaluation_and_predictions_equal_one_process[*",
        "!test_20_steps_evaluation_and_predictions_equal_one_process[dp2+zero1]",
        "!test_20_steps_evaluation_and_predictions_equal_one_process[tp2+sp x dp2+zero3]",
    ),
    "test_trl.py": (
        "test_a_trainer_equals_one_process[*",
        "!test_a_trainer_equals_one_process[sft-{'dp': 2, 'tp': 2, *",
        "!test_a_trainer_equals_one_process[dpo-*",
        "!test_a_trainer_equals_one_process[kto-{'tp': 2, *",
        "!test_a_trainer_equals_one_process[reward-{'dp': 2, *",
    ),
}

# Each capability once.
QUICK: dict[str, tuple[str, ...]] = {}


def matches(name: str, patterns: Iterable[str]) -> list[str]:
    """Return the patterns, those with ``!`` included, that a test's name without its file fits."""
    # Brackets stand for themselves, which fnmatch writes as [[].
    return [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]"))]


def belongs(found: Iterable[str]) -> bool:
    """Whether a test whose name fits these patterns is in their list."""
    found = list(found)
    return bool(found) and not any(pattern.startswith("!") for pattern in found)
