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
    ),
    "test_accelerate_checkpoints.py": (
        "test_a_save_that_ends_early[*-many steps]",
        "test_a_save_that_ends_early[kill-beside*",
        "test_a_save_that_ends_early[full-over*",
    ),
    "test_accelerate_recipes.py": (
        "test_a_stock_schedule_ends_where_it_should[*",
        "!test_a_stock_schedule_ends_where_it_should[steps-activate-plan0]",
        "!test_a_stock_schedule_ends_where_it_should[epochs-launched-plan2]",
        "test_the_accumulation_recipe_counts_each_row_once[*",
        "!test_the_accumulation_recipe_counts_each_row_once[dp2xtp2]",
        "test_a_stock_schedule_goes_on_under_another_dp[to tp2]",
    ),
    "test_accelerate_script.py": (
        "test_accelerates_own_scripts_pass_on_our_runtime[*",
        "test_the_example_trains_and_goes_on_under_another_plan",
    ),
    "test_agreement_of_readers.py": (
        "test_a_leader_sends_to_its_own_peers[*",
        "!test_a_leader_sends_to_its_own_peers[shape0-dp]",
        "!test_a_leader_sends_to_its_own_peers[shape1-None]",
        "!test_a_leader_sends_to_its_own_peers[shape2-dp]",
        "!test_a_leader_sends_to_its_own_peers[shape3-None]",
        "!test_a_leader_sends_to_its_own_peers[shape4-dp]",
    ),
    "test_calibration.py": ("test_two_processes_measure_and_plan",),
    "test_construction.py": (
        "test_weights_and_a_step_equal_those_of_a_materialised_model[*",
        "!test_weights_and_a_step_equal_those_of_a_materialised_model[llama-dp2xtp2+sp+zero1]",
        "!test_weights_and_a_step_equal_those_of_a_materialised_model[gemma2-dp2xtp2+sp+zero1]",
        "!test_weights_and_a_step_equal_those_of_a_materialised_model[phi3-tp2]",
        "test_a_rank_allocates_its_shard_only[*",
        "!test_a_rank_allocates_its_shard_only[checkpoint]",
    ),
    "test_copies.py": ("test_an_average_made_after_the_call[*", "!test_an_average_made_after_the_call[ema]"),
    "test_crashes.py": ("test_a_save_that_ends_at_any_step[many*",),
    "test_checkpoints.py": (
        "test_every_pair_of_plans[*",
        "!test_every_pair_of_plans[one-tp2xdp2+zero1]",
        "!test_every_pair_of_plans[tp2xdp2+zero1-one]",
        "!test_every_pair_of_plans[tp2+spxdp2+zero3-tp4]",
        "!test_every_pair_of_plans[tp4-dp4+zero3]",
    ),
    "test_damage.py": (
        "test_damage_is_an_error_that_names_the_file[*",
        "!test_damage_is_an_error_that_names_the_file[0]",
    ),
    "test_data_parallel_setup.py": ("test_the_example_with_the_wrapper_joins_the_launchers_processes",),
    "test_deepspeed.py": (
        "test_the_example_runs_and_ends_well",
        "test_a_stage_equals_one_process_and_its_checkpoints_resume[1]",
        "test_a_stage_equals_one_process_and_its_checkpoints_resume[2]",
        "test_equals_one_process_with[*",
        "!test_equals_one_process_with[stage 3, everything offloaded*",
    ),
    "test_demo.py": (
        "test_the_planner_picks_the_demo_s_plan",
        "test_a_plan_that_does_not_fit_is_one_clear_message",
        "test_the_demo_trains_and_proves_itself",
    ),
    "test_docs.py": (  # pages that run whole programs which other tests run too
        "test_the_blocks_of_a_page_run[CONTRIBUTING.md]",
        "test_the_blocks_of_a_page_run[accelerate.md]",
        "test_the_blocks_of_a_page_run[calibration.md]",
        "test_the_blocks_of_a_page_run[checkpoints.md]",
        "test_the_blocks_of_a_page_run[deepspeed.md]",
        "test_the_blocks_of_a_page_run[lora.md]",
        "test_the_blocks_of_a_page_run[trainer.md]",
        "test_the_blocks_of_a_page_run[verify.md]",
        "test_the_blocks_of_a_page_run[data.md]",
        "test_the_blocks_of_a_page_run[gaps.md]",
        "test_the_blocks_of_a_page_run[launching.md]",
        "test_the_blocks_of_a_page_run[primitives.md]",
        "test_the_blocks_of_a_page_run[transformers.md]",
    ),
    "test_ended_ranks.py": (
        "test_a_stopped_rank_ends_the_others_within_the_timeout_and_5_seconds[1]",
        "test_a_rank_that_finishes_later_is_left_in_peace[1]",
        "test_torchrun_ends_with_the_cause",
    ),
    "test_examples.py": ("test_adapters_are_tuned_over_two_processes", "test_a_plain_loop_goes_on_under_another_plan"),
    "test_export.py": ("test_from_pretrained_gives_the_weights_bitwise[gemma2-bf16]",),
    "test_families.py": (
        "test_equals_one_device_as_the_page_says[*",
        "!test_equals_one_device_as_the_page_says[apertus and so on]",
        "test_variants[falcon*",
        "!test_variants[falcon, eager alibi]",
        "test_without_sequence_parallelism[*",
        "!test_without_sequence_parallelism[bloom]",
        "!test_without_sequence_parallelism[gpt2]",
        "!test_without_sequence_parallelism[minicpm3]",
    ),
    "test_heads.py": (
        "test_heads_split_over_data_parallel_ranks[{'dp': 2}]",
        "test_heads_split_over_data_parallel_ranks[*2}]",
        "!test_heads_split_over_data_parallel_ranks[{'dp': 2}]",
        "test_heads_over_tensor_parallel_ranks[{'tp': 2}]",
    ),
    "test_hf_datasets.py": ("test_ranks_and_workers_change_in_mid_epoch[files]",),
    "test_hf_from_pretrained.py": (
        "test_equals_one_process[*",
        "!test_equals_one_process[qwen3, several files-dp2xtp2, zero1 later]",
        "!test_equals_one_process[llama, tied, one kv head-tp2]",
    ),
    "test_inputs.py": (
        "test_options[*",
        "!test_options[llama-eager*",
        "!test_options[llama-tied*",
        "!test_options[llama-a vocabulary*",
        "!test_options[llama-gradient*",
        "!test_options[olmo2-one kv*",
        "!test_options[olmo2-kv heads*",
        "!test_options[phi3-one kv*",
        "!test_options[phi3-kv heads*",
        "!test_options[phi3-no grouping*",
        "!test_options[qwen3-no grouping*",
        "!test_options[qwen3-gradient*",
        "test_inputs[gemma2-*",
        "!test_inputs[gemma2-left*",
        "!test_inputs[gemma2-packed*",
        "test_micro_batches_within_the_call[*",
        "!test_micro_batches_within_the_call[plan0-split2]",
        "!test_micro_batches_within_the_call[plan1-split1]",
        "!test_micro_batches_within_the_call[plan2-split0]",
        "test_gradients_of_inputs[*-True]",
        "!test_gradients_of_inputs[plan1-True]",
    ),
    "test_launch_hosts.py": ("test_a_lost_host_ends_the_other_with_an_error_that_names_it[cut off]",),
    "test_loader.py": (
        "test_batches_are_those_of_one_device[*-12-4]",
        "test_batches_are_those_of_one_device[*-7-3]",
    ),
    "test_model_saves_that_end_early.py": (
        "test_a_model_is_the_old_or_the_new[*",
        "!test_a_model_is_the_old_or_the_new[kill-files over one-some steps]",
        "!test_a_model_is_the_old_or_the_new[kill-one file over files-some steps]",
        "!test_a_model_is_the_old_or_the_new[*-files over files-some steps]",
        "test_an_optimizer_is_the_old_or_the_new[*-many steps]",
    ),
    "test_optimizer_state.py": (
        "test_training_goes_on_exactly[*",
        "!test_training_goes_on_exactly[tp2+spxdp2+zero3-*",
        "!test_training_goes_on_exactly[dp2+zero1-tp2+sp]",
        "!test_training_goes_on_exactly[tp2+sp-dp2+zero1]",
    ),
    "test_optimizers.py": (
        "test_optimizers_keep_their_semantics[*",
        "!test_optimizers_keep_their_semantics[*options0-plan1]",
        "!test_optimizers_keep_their_semantics[*options1-plan2]",
        "!test_optimizers_keep_their_semantics[*options2-plan0]",
        "!test_optimizers_keep_their_semantics[*options3-plan1]",
        "!test_optimizers_keep_their_semantics[*options4-plan2]",
        "!test_optimizers_keep_their_semantics[*options5-plan0]",
        "test_other_norms[1.0]",
    ),
    "test_own_decoder.py": (
        "test_its_training_is_that_of_one_process[*",
        "!test_its_training_is_that_of_one_process[tp2+sp]",
        "!test_its_training_is_that_of_one_process[dp2 zero3]",
    ),
    "test_packing.py": (
        "test_fill_on_log_normal_lengths[*",
        "!test_fill_on_log_normal_lengths[0-*",
    ),
    "test_parity.py": (
        "test_equals_one_process_in_float64[*",
        "!test_equals_one_process_in_float64[llama-*",
        "!test_equals_one_process_in_float64[qwen3-dp2xtp2+sp+zero1]",
        "!test_equals_one_process_in_float64[gemma2-dp2xtp2+sp+zero1]",
        "test_no_sync_gives_the_same_numbers[qwen3]",
        "test_losses_equal_one_process_in_float32_over_20_steps[*",
    ),
    "test_placement.py": (
        "test_every_pair_on_one_axis[ProcessMesh([0, 1, 2, 3], *",
        "test_every_pair_on_two_axes[*",
        "!test_every_pair_on_two_axes[(7, 5)-4]",
        "test_every_pair_across_meshes[*",
        "!test_every_pair_across_meshes[ProcessMesh([2, 0], *",
        "test_every_dtype_moves_bit_by_bit[*",
        "!test_every_dtype_moves_bit_by_bit[torch.bfloat16]",
        "!test_every_dtype_moves_bit_by_bit[torch.uint16]",
    ),
    "test_planner_footprint.py": (
        "test_estimate_and_trace[*",
        "!test_estimate_and_trace[gemma2-dp2+zero3+micro-*",
        "!test_estimate_and_trace[gemma2-dp2xtp2+sp+zero3-dtype90]",
        "!test_estimate_and_trace[gemma2-tp2+sp+recompute-dtype42]",
    ),
    "test_planner_validation.py": ("test_eight_runs_are_enough[vTrain*",),
    "test_primitives_examples.py": ("test_torchrun_starts_a_program", "test_the_table_of_who_reads_what"),
    "test_resume.py": (
        "test_a_resumed_run_is_equal_to_the_bit[tp2+sp]",
        "test_a_resumed_run_is_equal_to_the_bit[dp2xtp2+zero1]",
        "test_a_resumed_run_is_equal_to_the_bit[dp2+zero3, recompute, workers]",
    ),
    "test_random_programs.py": (
        "test_a_random_program_is_equal_or_told[*",
        *(f"!test_a_random_program_is_equal_or_told[{seed}]" for seed in range(8)),
    ),
    "test_shard_dataloader.py": (
        "test_whole_batches_are_those_of_one_device[*",
        "!test_whole_batches_are_those_of_one_device[7-4-*",
        "!test_whole_batches_are_those_of_one_device[8-4-nested]",
        "!test_whole_batches_are_those_of_one_device[9-4-dict]",
        "!test_whole_batches_are_those_of_one_device[5-3-lists]",
    ),
    "test_spmd.py": (
        "test_nothing_is_found_in_a_family[*",
        "!test_nothing_is_found_in_a_family[llama-*",
        "!test_nothing_is_found_in_a_family[*-tp2+sp]",
    ),
    "test_state_dicts.py": (
        "test_every_rank_loads_a_one_device_state[plain-*",
        "!test_every_rank_loads_a_one_device_state[plain-*3}]",
        "test_every_rank_loads_a_one_device_state[tied-{'dp': 2, 'zero*",
    ),
    "test_thawing.py": (
        "test_gradual_unfreezing[*",
        "!test_gradual_unfreezing[{'tp': 2, 's*",
        "!test_gradual_unfreezing[{'dp': 2, 'zero_stage': 2}]",
        "!test_gradual_unfreezing[{'dp': 2, 'gradient*1}]",
        "!test_gradual_unfreezing[{'dp': 2, 'micro*",
        "test_gradual_unfreezing_with_accumulation_and_zeros[{'dp': 2}]",
        "test_gradual_unfreezing_with_accumulation_and_zeros[*1}]",
    ),
    "test_tracing.py": (
        "test_a_trace_is_what_a_run_measures[*",
        "!test_a_trace_is_what_a_run_measures[llama-dp2xtp2+sp+zero1]",
    ),
    "test_trainer.py": (
        "test_20_steps_evaluation_and_predictions_equal_one_process[*",
        "!test_20_steps_evaluation_and_predictions_equal_one_process[dp2+zero1]",
        "!test_20_steps_evaluation_and_predictions_equal_one_process[tp2+sp x dp2+zero3]",
        "test_a_loss_divided_by_the_count_of_items[{'dp': 2}]",
        "test_resuming_in_mid_epoch_gives_the_same_numbers_under_any_plan[{'dp': 2}*",
    ),
    "test_trainer_checkpoints.py": (
        "test_a_stock_checkpoint_comes_with_its_optimizer[*zero_stage*",
        "test_a_save_that_ends_early[*-many steps]",
        "test_a_save_that_ends_early[kill-over*",
        "test_a_save_that_ends_early[full-beside*",
    ),
    "test_trainer_edges.py": (
        "test_odd_uses_equal_one_process[{'tp': 2}]",
        "test_a_model_that_is_distributed_already_trains_by_its_plan[*",
        "!test_a_model_that_is_distributed_already_trains_by_its_plan[1-with*",
        "!test_a_model_that_is_distributed_already_trains_by_its_plan[3-as*",
    ),
    "test_trainer_subclasses.py": (
        "test_a_compiled_model_keeps_the_numbers[{'tp': 2, *",
        "test_an_adapter_trains_and_is_resumed[{'dp': 2, *",
        "test_bf16_autocast_is_as_close_to_one_process_as_bf16_is_exact[{'dp': 2, *",
    ),
    "test_training_input.py": (
        "test_training_goes_on_with_another_plan_batch_size_and_workers[map]",
        "test_a_worker_that_dies_ends_all_ranks_with_its_error[raises*",
    ),
    "test_traits.py": (
        "test_initial_weights_are_bitwise_those_of_one_process[*",
        "!test_initial_weights_are_bitwise_those_of_one_process[phi3]",
        "test_generate[qwen3-*",
    ),
    "test_trl.py": (
        "test_a_trainer_equals_one_process[*",
        "!test_a_trainer_equals_one_process[sft-{'dp': 2, 'tp': 2, *",
        "!test_a_trainer_equals_one_process[dpo-*",
        "!test_a_trainer_equals_one_process[kto-{'tp': 2, *",
        "!test_a_trainer_equals_one_process[reward-{'dp': 2, *",
    ),
    "test_values_compared.py": ("test_a_legal_program_is_not_stopped[*", "!test_a_legal_program_is_not_stopped[17]"),
    "test_values_from_outside.py": (
        "test_written_weights_are_stepped[*",
        "!test_written_weights_are_stepped[clamp_-*1}]",
        "!test_written_weights_are_stepped[data-*1}]",
        "!test_written_weights_are_stepped[data.clamp_-*2}]",
        "!test_written_weights_are_stepped[load_state_dict-*2}]",
    ),
    "test_weight_files.py": (
        "test_weights_from_a_checkpoint[*",
        "!test_weights_from_a_checkpoint[single-real]",
        "!test_weights_from_a_checkpoint[index-deferred]",
        "!test_weights_from_a_checkpoint[directory-meta]",
    ),
    "test_zero.py": (
        "test_losses_and_norms_over_20_steps[*",
        "!test_losses_and_norms_over_20_steps[3]",
        "test_in_and_out[{'dp': 2, 'zero*",
    ),
}

# Each capability once.
QUICK: dict[str, tuple[str, ...]] = {
    "test_accelerate_recipes.py": ("test_the_accumulation_recipe_counts_each_row_once[dp2xtp2]",),
    "test_api.py": ("*",),
    "test_bad_input.py": ("*",),
    "test_calls.py": ("*",),
    "test_construction.py": ("test_weights_and_a_step_equal_those_of_a_materialised_model[llama-dp2xtp2+sp+zero1]",),
    "test_copies.py": ("test_an_average_made_after_the_call[ema]",),
    "test_data_parallel.py": ("*",),
    "test_deepspeed_config.py": ("*",),
    "test_doctor.py": ("*",),
    "test_faults.py": ("test_collectives_that_differ_are_named_before_they_run*",),
    "test_hf_configs.py": ("*", "!test_a_plain_import_is_enough"),
    "test_hf_from_pretrained.py": ("test_equals_one_process[llama, tied, one kv head-tp2]",),
    "test_identity.py": ("*",),
    "test_layout.py": ("*",),
    "test_lora.py": ("test_training_equals_one_process*",),
    "test_losses.py": ("*",),
    "test_micro_batch_outputs.py": ("*",),
    "test_optimizer_state.py": ("test_training_goes_on_exactly[dp2+zero1-tp2+sp]",),
    "test_orders.py": ("test_the_orders_of_one_device*",),
    "test_packing.py": ("test_a_plain_loop_keeps_packed_documents_apart*",),
    "test_parity.py": (
        "test_equals_one_process_in_float64[llama-tp2+sp]",
        "test_equals_one_process_in_float64[qwen3-dp2xtp2+sp+zero1]",
        "test_equals_one_process_in_float64[llama-dp2xtp2+sp+zero3]",
        "test_a_mean_of_means_would_be_caught",
    ),
    "test_placement.py": ("test_lists_numbers_and_negative_dims", "test_bad_input_fails_on_every_rank_alike"),
    "test_plan_words.py": ("*",),
    "test_planner_memory.py": ("*",),
    "test_planner_search.py": ("test_choices_are_legal_ranked_and_fit*",),
    "test_planner_time.py": ("*",),
    "test_plans.py": ("test_every_family_gets_the_roles*", "test_a_class_nobody_has_seen_equals_one_process*"),
    "test_random_programs.py": ("test_a_random_program_is_equal_or_told[1]",),
    "test_referee.py": ("*",),
    "test_resharding.py": ("*",),
    "test_resume.py": ("test_a_resumed_run_is_equal_to_the_bit[dp2]", "test_each_component_matters*"),
    "test_save_pretrained.py": ("test_saved_files_are_those_of_stock*",),
    "test_shard_dataloader.py": ("test_the_weighted_gradient_of_a_tail_is_that_of_one_process*",),
    "test_shards_say_so.py": ("*",),
    "test_spmd.py": ("test_a_planted_fault_is_named*",),
    "test_state_dicts.py": ("test_a_part_of_the_state_is_never_given_out*",),
    "test_stream.py": ("test_batches_do_not_depend_on_the_mesh*",),
    "test_thawing.py": ("test_four_ranks",),
    "test_tracing.py": ("test_live_bytes_are_those_of_what_is_held",),
    "test_trainer.py": ("test_20_steps_evaluation_and_predictions_equal_one_process[tp2+sp x dp2+zero3]",),
    "test_traits.py": ("test_generate[llama*",),
    "test_trl.py": ("test_a_trainer_equals_one_process[dpo-*",),
    "test_values_compared.py": ("test_a_fault_on_one_rank_is_named*",),
    "test_verify.py": ("test_a_model_that_trains_as_on_one_device",),
    "test_zero.py": ("test_equals_one_process_in_float64[stage 2]",),
}


def matches(name: str, patterns: Iterable[str]) -> list[str]:
    """Return the patterns, those with ``!`` included, that a test's name without its file fits."""
    # Brackets stand for themselves, which fnmatch writes as [[].
    return [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]"))]


def belongs(found: Iterable[str]) -> bool:
    """Whether a test whose name fits these patterns is in their list."""
    found = list(found)
    return bool(found) and not any(pattern.startswith("!") for pattern in found)
