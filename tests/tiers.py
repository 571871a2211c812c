"""The tests that the fast tier leaves out: products, of which it keeps one of each kind, and those of capabilities that
were never measured on real models, which have tiers of their own.

A key of `FULL` is a test, a file or a folder; its value the parameters that stay in the fast tier, as patterns for the
text in brackets. The longest key counts. Single tests have the marks `full` and `slow` instead. `ASIDE` has the same
keys by tier; the patterns are those of the parameters that go there.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

NONE: tuple[str, ...] = ()
ALL = ("*",)
MODELS = ("llama", "cohere2_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2")
"""Of the architectures of mlx-lm: one of each way to keep a context, to mix experts and to name tensors; and ours."""
SOURCES = ("llama", "gemma4", "gemma4-moe", "qwen3.5-moe", "qwen3-next", "nemotron-h", "gpt-oss", "llama4", "falcon-h1")
"""Of the published models, likewise."""
PUBLISHED = (
    *("Llama 3.3 in 4 bits", "Code Llama", "Ministral 3 in FP8", "Gemma 3 1B", "Gemma 3n", "Gemma 4 26B", "LFM2"),
    *("Qwen 2.5 VL", "Qwen 3 Next", "Qwen 3 30B of transformers 5", "DeepSeek R1", "gpt-oss", "Command R7B", "GPT-2"),
    *("Nemotron 3 Nano of transformers 5", "Llama 4 Scout", "GLM 4 0414", "Phi 3 mini", "Devstral"),
)
"""Of the corpus: one row for each kind of layer, rotation, window and tokenizer."""
MIXTURES = frozenset(("mamba2", "falcon_h1", "deepseek_v3", "deepseek_v32"))
"""Tiny models whose layers are of kinds that others have too, in other mixtures, lists or widths."""

FULL: Mapping[str, tuple[str, ...]] = {
    # Real models: random users and long stories on two or three kinds, products of faults and kinds on one or two.
    "tests/model/architectures/test_architectures.py::test_an_architecture": MODELS,
    "tests/model/architectures/test_architectures.py::test_a_text_may_be_cut_anywhere": (
        *("gpt_oss-mxfp4", "qwen3_next-4 bits", "kimi_linear-8 bits", "deepseek_v3-*", "llama-float32"),
    ),
    "tests/model/architectures/test_nodes.py": ("*-few",),
    "tests/model/architectures/test_mended.py::test_a_window_that_mlx_lm_does_not_read_is_kept": ("qwen2",),
    "tests/model/architectures/test_mended.py::test_a_scaling_that_mlx_lm_does_not_read_is_applied": ("qwen3_moe",),
    "tests/model/architectures/test_mended.py::test_yarn_follows_the_fields_that_mlx_lm_does_not_read": (
        "given[13]-gpt_oss",
    ),
    "tests/model/architectures/test_mended.py::test_rope_interleave_decides_which_pairs_rotate": (
        "deepseek_v3-given2-*",
    ),
    "tests/model/architectures/test_mended.py::test_a_field_that_no_module_reads_is_reported": ("olmoe-*", "smollm3-*"),
    "tests/model/cache/test_memory.py::test_what_is_counted_is_what_is_held": ("qwen3_next",),
    "tests/model/cache/test_trie_together_faults.py::test_whatever_breaks_the_others_go_on": (
        *("*-FakeRecurrentState-*", "*-SequenceLayers-*", "*-PrefixTrie-*", "*-LiveSequences-*"),
    ),
    "tests/model/cache/test_memory.py::test_a_long_prefill_leaves_states_behind_and_no_forward": ("qwen3_next",),
    "tests/model/cache/test_disk.py::test_a_restored_answer_is_what_the_writer_would_have_answered": (
        "*-one turn more",
    ),
    "tests/model/cache/test_disk.py::test_a_conversation_goes_on_over_many_processes": (
        "llama",
        "gemma3",
        "qwen3_next",
    ),
    "tests/model/drafts/assistant/test_drafter.py::test_drafts_are_those_of_the_whole_text": ("gemma4-trie",),
    "tests/model/drafts/heads/test_head_values.py::test_a_head_computes_what_its_formulas_say": (
        *("qwen3.5", "qwen3-next-moe", "nemotron-h"),
    ),
    "tests/model/drafts/heads/test_head_values.py::test_what_older_releases_wrote_is_the_same_head": (
        *("qwen3.5-text", "qwen3.5-moe", "nemotron-h"),
    ),
    "tests/model/media/test_sight.py::test_a_model_with_a_tower_sees": (
        *("qwen3.5-seeing", "gemma4-unified-seeing", "nemotron-omni-seeing", "glimmer-seeing"),
    ),
    "tests/model/loading/test_per_layer.py::test_a_gemma_4_with_fields_for_its_full_layers_answers_as_before": (
        "gemma4-unified",
    ),
    "tests/model/engine/test_not_numbers.py": (
        *("", "llama", "gemma3", "1-mamba2", "a head", "NaN", "all closed", "-NaN", "right-NaN"),
    ),
    "tests/model/engine/test_drafts.py::test_drafts_change_nothing": ("gemma3-*",),
    **{
        f"tests/model/engine/test_first_tokens.py::test_{name}": ("llama*", "gemma3*", "qwen3_next*")
        for name in (
            "answers_that_began_together_are_repeated_together",
            "a_repeat_has_its_first_token_at_once",
            "a_prompt_that_was_evicted_is_computed_first",
            "a_client_that_leaves_after_it_spoils_nothing",
        )
    },
    "tests/model/engine/test_drafted.py::test_four_requests_about_one_text_that_are_asked_again_take_few_forwards": (
        "llama",
    ),
    "tests/model/engine/test_ranks.py::test_the_mixes_have_all_that_a_follower_must_do": NONE,
    "tests/model/engine/test_replay.py::test_the_mixes_have_all_that_a_replay_must_do_again": NONE,
    "tests/model/engine/test_scheduler_batches.py::test_a_batch_makes_room_layer_by_layer_before_others_join": (
        *("5-llama", "5-gemma3", "5-qwen3_next"),
    ),
    "tests/model/engine/test_score.py::test_rows_beside_an_answer_are_those_of_a_plain_forward": (
        *("trie-*llama*", "trie-gemma3", "trie-qwen3_next", "trie-quantized", "trie-deepseek_v41"),
    ),
    "tests/model/cache/test_round_states.py::test_a_layer_stands_behind_any_token_of_a_round": (
        *("baichuan_m1", "bailing_moe_linear", "kimi_linear", "mamba", "recurrent_gemma", "rwkv7"),
    ),
    "tests/model/cache/test_round_states.py::test_states_in_a_round_are_those_of_a_forward_over_its_first_tokens": (
        *("mamba2", "qwen3_next", "rwkv7"),
    ),
    "tests/model/cache/test_round_states.py::test_a_round_keeps_little_beside_the_layers": ("kimi_k3", "rwkv7"),
    "tests/model/cache/test_passed_checkpoints.py::test_a_passed_checkpoint_holds_what_a_stop_there_leaves": (
        *("gemma3_text", "gpt_oss", "kimi_linear", "lfm2", "llama4", "mamba2", "nemotron_h", "qwen3_5", "rwkv7"),
    ),
    "tests/model/cache/test_passed_checkpoints.py::test_a_prompt_goes_on_from_each_passed_checkpoint": (
        *("gemma3_text", "llama4", "qwen3_5", "recurrent_gemma", "rwkv7"),
    ),
    "tests/model/drafts/heads/test_drafter.py::test_drafts_are_those_of_the_whole_text": ("qwen3-next-*", "qwen3.5-7"),
    "tests/model/drafts/assistant/test_load.py::test_a_broken_assistant_costs_a_line_or_the_start": (
        *("a projection less", "no centroids", "fewer tokens", "a token twice"),
    ),
    "tests/model/engine/test_drafts.py::test_a_models_drafts_change_nothing": (
        *("qwen3_next-*", "gemma4-drawn-every token-single"),
    ),
    "tests/model/engine/test_drafts.py::test_each_answer_is_the_one_that_it_is_alone": (
        *("gemma3-*-8", "a head-*-4", "an assistant-penalties-*"),
    ),
    "tests/model/engine/test_drafts.py::test_right_drafts_save_forwards_and_the_cache_keeps_as_much": ("qwen3_next",),
    "tests/model/engine/test_drafts.py::test_one_of_them_may_end_anywhere_in_a_round": (
        *("falcon_h1-[147]-*", "a head-2-random", "an assistant-2-random"),
    ),
    "tests/model/engine/test_drafts.py::test_formats_look_ahead_for_each_of_them": ("*-random-0 *-qwen3_next",),
    "tests/model/engine/test_drafts.py::test_answers_come_and_go_and_some_find_no_memory": ("gemma3",),
    "tests/model/engine/test_drafted.py::test_some_have_known_text_and_a_model_drafts_for_the_others": ("a head",),
    "tests/model/engine/test_drafted.py::test_the_drafts_of_each_are_those_of_its_whole_text": (
        *("a head", "blocks behind windows"),
    ),
    "tests/model/engine/test_drafts.py::test_drafts_change_nothing_in_a_format": ("forced text between-*-right-*",),
    "tests/model/engine/test_drafts.py::test_an_answer_may_end_anywhere_in_a_round": ("gemma3-4-*", "gemma3-11-*"),
    "tests/model/engine/test_drafts.py::test_a_model_that_is_the_answers_own_is_always_right": ("gemma3",),
    "tests/model/engine/test_drafts.py::test_answers_are_drafted_behind_pictures": (
        "gemma4-seeing-an assistant-True",
        "*-a stranger-True",
    ),
    "tests/model/engine/test_replay.py::test_any_mix_is_replayed": ("qwen3_next",),
    "tests/model/engine/test_ranks.py::test_a_follower_does_what_its_leader_does": ("qwen3_next",),
    "tests/model/engine/test_disk_pauses.py::test_a_message_waits_for_a_piece": ("gemma3", "qwen3_next"),
    "tests/model/engine/test_disk_pauses.py::test_an_answer_waits_no_longer_than_two_milliseconds": ("llama",),
    "tests/model/drafts/test_own_model.py::test_drafts_depend_on_each_text_alone": ("gemma3-2",),
    "tests/model/engine/test_disk.py::test_a_conversation_goes_on_after_the_process_has_gone": ("llama", "qwen3_next"),
    "tests/model/engine/test_disk.py::test_a_prompt_is_on_disk_when_its_answer_ends": ("300",),
    "tests/model/cache/test_rounds.py": ("*llama", "*gemma3", "*qwen3_next"),
    "tests/model/cache/test_rounds.py::test_an_answer_in_rounds_is_the_plain_one": (
        *("gemma3-4-*", "gemma3-7-*", "llama4-4-*", "llama-2-*", "quantized-2-*", "qwen3_next-2-*"),
    ),
    "tests/model/cache/test_decode_rows.py::test_a_stay_in_a_batch_is_like_decoding_alone": (
        *("llama-stepwise", "gemma3-drafted", "qwen3_next-stepwise"),
    ),
    "tests/model/cache/test_models.py::test_a_conversation_comes_back_at_any_length_of_its_window": ("*1", "*5"),
    "tests/model/cache/test_models.py::test_a_conversation_that_comes_back_is_bit_equal_to_one_that_never_left": ALL,
    "tests/model/engine/test_memory_budget.py": ("none-llama",),
    "tests/model/engine/test_memory.py::test_an_answer_that_outgrows_the_room_ends_alone_with_the_numbers": NONE,
    "tests/model/engine/test_scheduler_order.py::test_answers_that_cannot_be_computed_together_take_turns": ("llama4",),
    "tests/model/engine/test_scheduler_order.py::test_what_was_computed_is_kept_for_the_retry": (
        *("llama-batch", "qwen3_next-*", "llama4-alone"),
    ),
    "tests/model/engine/test_generation.py": ("*llama*", "*gemma3*", "*qwen3_next*", ""),
    "tests/model/engine/test_pictures.py::test_rows_of_one_batch_have_positions_of_their_own": (
        *("qwen3.5-seeing", "gemma4-unified-seeing", "nemotron-omni-seeing"),
    ),
    "tests/model/engine/test_scheduler_batches.py::test_eight_answers_of_every_sort_are_what_each_is_alone": (
        "llama",
        "qwen3_next",
    ),
    "tests/model/engine/test_scheduler_faults.py::test_a_fault_ends_at_most_the_request_that_it_concerns": (
        "TrieCache.begin",
        "mlx.core.eval",
        "Session.absorb",
    ),
    "tests/model/engine/test_scheduler_faults.py::test_a_forward_that_breaks_ends_one_request_and_a_batch_of_them_none": (  # noqa: E501
        "qwen3_next",
    ),
    "tests/model/engine/test_scheduler_mix.py": ("llama-0", "gemma3-0", "qwen3_next-0"),
    # Models that see: positions in three channels, tokens that see each other, and neither.
    "tests/model/media/test_forward.py": ("qwen3.5-seeing*", "gemma4-unified-seeing*", "nemotron-omni-seeing*"),
    "tests/model/media/test_forward.py::test_any_cuts_give_the_same": (
        *("qwen3.5-seeing-behind a window", "gemma4-unified-seeing-one", "nemotron-omni-seeing-wider than the window"),
    ),
    "tests/model/media/towers/test_stored.py::test_a_directory_and_a_store_hold_the_same_tower": (
        *("qwen3.5-seeing", "nemotron-omni-seeing"),
    ),
    "tests/model/media/towers/test_stored.py::test_a_directory_and_a_store_hold_the_same_tower_of_a_gemma": (
        *("glimmer-seeing", "gemma4-unified-seeing"),
    ),
    "tests/model/engine/test_sounds.py": ("", "gemma4-unified-hearing*", "gemma4-hearing-trie"),
    "tests/model/engine/test_pictures_cached.py": ("qwen3.5-seeing*",),
    # Loading: every architecture, release, type and writer.
    "tests/model/loading/test_loading.py::test_memory_stays_near_the_size_of_the_weights": ("file",),
    "tests/model/loading/test_loading.py::test_few_files_that_may_be_open_are_enough": NONE,
    "tests/model/loading/test_sources.py::test_a_source_computes_the_same_from": ("qwen3.5-moe", "gpt-oss"),
    "tests/model/loading/test_check_trial.py::test_a_tensor_that_holds_no_numbers_is_named": ("nan",),
    "tests/model/loading/test_odd_json.py::test_a_file_is_served_or_refused_by_its_name": (
        *("config.json", "tokenizer.json", "model.safetensors.index.json"),
    ),
    "tests/model/loading/test_defaults.py::test_a_field_that_has_a_default_is_not_demanded": ("llama-*", "muse-*"),
    "tests/published/test_published.py": PUBLISHED,
    "tests/model/ranks/test_share.py::test_ranks_with_other_budgets_compute_in_the_same_type": NONE,
    "tests/model/ranks/test_load_share.py::test_memory_stays_near_the_share_and_nothing_is_left_to_be_read": (
        *("blobs", "experts"),
    ),
    # Processes: a fault of each sort at one point, a hostile client of each sort, each way to start and to end once.
    "tests/process/faults/test_any_call.py": NONE,
    "tests/process/faults/test_any_call.py::test_a_fault_anywhere_ends_one_request": (
        *("forward", "accept drafts", "revert layers"),
    ),
    "tests/process/faults/test_disk.py": NONE,
    "tests/process/faults/test_outputs.py": NONE,
    "tests/process/faults/test_restart.py": NONE,
    "tests/process/faults/test_restart.py::test_it_restarts_on_the_same_port_after_a_kill": ALL,
    "tests/process/hostile/test_bodies.py": NONE,
    "tests/process/hostile/test_connections.py": NONE,
    "tests/process/hostile/test_formats.py": NONE,
    "tests/process/hostile/test_media.py::test_a_client_leaves_while_its_medium_is_encoded": ("a picture",),
    "tests/process/hostile/test_media.py::test_a_client_leaves_while_its_sound_is_measured": NONE,
    "tests/process/hostile/test_media.py::test_a_file_without_sound_is_refused_for_next_to_nothing": NONE,
    "tests/process/hostile/test_media.py::test_a_sound_of_four_gigabytes_by_its_header_is_heard_to_the_end_of_the_file": NONE,  # noqa: E501
    "tests/process/faults/test_fatal.py::test_the_process_ends_with_one_line_when_the_engine_dies": ("sample*",),
    "tests/process/launcher/test_launch.py": ("", "command-symlink", "script-descriptor"),
    "tests/process/launcher/test_hand_over.py": NONE,
    "tests/process/launcher/test_hand_over.py::test_a_tower_that_only_ollamas_runner_may_load_is_taken_over": ALL,
    "tests/process/page/test_history.py": NONE,
    "tests/process/page/test_page.py": NONE,
    "tests/process/ranks/test_answers.py": NONE,
    "tests/process/ranks/test_answers.py::test_the_leaders_token_counts": ALL,
    "tests/process/ranks/test_failures.py": NONE,
    "tests/process/ranks/test_failures.py::test_a_follower_is_killed_in_an_answer": ALL,
    "tests/process/ranks/test_follow.py::test_loads_follow_each_other_and_end_with_their_service": NONE,
    "tests/process/test_score.py::test_scores_of_pictures_are_those_of_a_completion": NONE,
    "tests/process/test_check.py::test_a_format_is_compiled_as_for_a_request": ("*path*",),
    "tests/process/test_check.py::test_the_report_has_a_line_for_a_format": NONE,
    "tests/process/test_formats.py": NONE,
    "tests/process/test_spawn.py::test_a_shorter_context_is_reported_and_enforced": NONE,
    "tests/process/test_disk.py::test_a_killed_process_leaves_its_conversations": NONE,
    "tests/process/test_exit.py": ("prefill*", "idle*"),
    "tests/process/test_refusals.py::test_a_broken_store_is_one_line_and_exit_status_1": (
        "blob missing",
        "tensor missing",
    ),
    "tests/process/test_disk.py::test_processes_that_share_a_directory_are_killed_at_any_moment": NONE,
    "tests/process/test_environment.py": NONE,
    # Tools: the cases of the conformance suite that need no process of their own, benchmarks and soaks by their parts.
    **{
        f"tests/tools/bench/test_runs.py::test_{name}": NONE
        for name in (
            *("start", "decode", "families", "parallel", "ttft", "ollamas_own_runner_gets_the_model_in_a_store"),
            *("a_contender_that_does_not_start_is_named_by_what_it_says", "embeddings"),
        )
    },
    "tests/tools/conformance/test_conformance.py::test_case": (
        "1[569]-*-H",
        "[2-46]?-*-H",
        "5[02-9]-*-H",
        "7[0-5]-*-H",
        *("11.9-*-H", "12.4-*", "12.15-*"),
        "12.3[39]-*",
        "12.4[14]-*",
    ),
    "tests/tools/conformance/test_failures.py": NONE,
    "tests/tools/conformance/test_report.py::test_an_executable_that_does_not_start_is_told_at_once": NONE,
    "tests/tools/conformance/test_report.py::test_a_failure_is_exit_status_1": NONE,
    "tests/tools/conformance/test_report.py::test_a_runner_of_two_ranks_is_asked_what_it_answers_as_one_does": NONE,
    "tests/tools/scripts/test_demo.py::test_every_talk_is_right": NONE,
    "tests/tools/scripts/test_demo.py::test_every_talk_about_sounds_is_right": NONE,
    "tests/tools/scripts/test_demo.py::test_a_sound_survives_a_restart_and_another_one_shares_nothing_of_it": NONE,
    "tests/tools/scripts/test_environment.py::test_help_comes_before_the_set_up": (
        *("lock --help", "host --help", "ollama-serve --help"),
    ),
    "tests/tools/scripts/test_host_process.py": NONE,
    "tests/tools/scripts/test_host.py::test_a_template_that_goes_too_far_is_an_error_and_the_next_one_is_not": NONE,
    "tests/tools/scripts/test_soak.py::test_nothing_goes_wrong": NONE,
    "tests/tools/scripts/test_soak.py::test_a_bad_runner_is_found_out": NONE,
    "tests/tools/models/test_sources.py": SOURCES,
    # Units: one kind of layer where memory is waited for, one field where all are read alike, no long random search.
    "tests/unit/test_cpu.py::test_every_product_is_right_on_other_processors": NONE,
    "tests/unit/test_kernel_memory.py::test_kernels_of_other_widths_compute_the_same": NONE,
    "tests/unit/test_gpu_scans.py::test_scans_for_gpus_are_exact_whatever_the_cuts_and_rows": ("cuda-*",),
    "tests/unit/test_conftest.py::test_what_waits_in_c_shows_the_main_thread_first_and_ends_its_process": NONE,
    "tests/unit/cache/test_batch.py::test_a_batch_holds_nothing_but_itself": ("window",),
    "tests/unit/cache/test_batch.py::test_what_is_absorbed_keeps_no_batch_alive": ("window-200",),
    "tests/unit/cache/test_snapshots.py::test_what_is_copied_out_keeps_no_buffer_alive": ("plain-8", "window-1"),
    "tests/unit/cache/test_batch.py::test_rows_come_and_go": ("0", "1"),
    "tests/unit/cache/test_trie_together_random.py::test_any_users_at_the_same_time_leave_each_other_alone": ("S",),
    "tests/unit/disk/test_store.py::test_an_error_at_any_call_raises_nothing": ("ENOSPC", "EIO"),
    "tests/unit/drafts/test_policy.py::test_a_models_drafts_are_as_long_as_pays_for_drafting_them": (
        *("0.0-*", "0.8-0.05-*-large context", "0.8-1.0-*-large context"),
    ),
    "tests/unit/drafts/test_policy.py::test_drafts_of_several_answers_that_are_never_right_cost_next_to_nothing": (
        "4-*",
    ),
    "tests/unit/drafts/test_policy.py::test_several_answers_are_drafted_as_far_as_that_pays_for_all": ("4-*",),
    "tests/unit/drafts/test_policy.py::test_lengths_are_nearly_as_good_as_the_best_fixed_one": ("*-large context",),
    "tests/unit/drafts/test_played.py::test_drafts_make_answers_faster_on_a_machine_whose_speed_varies": (
        *("2 repeat", "2 repeat and 2 fresh", "4 agents"),
    ),
    "tests/unit/media/test_decode_process.py::test_the_memory_that_is_counted_is_enough": NONE,
    "tests/unit/media/test_decode_process.py::test_it_gets_the_memory_that_a_sound_of_its_length_takes": NONE,
    "tests/unit/media/test_decode_process.py::test_it_gets_the_processor_time_that_a_medium_of_its_size_takes": NONE,
    "tests/unit/media/test_fuzz.py::test_a_damaged_picture_is_read_or_refused": ("jpeg", "png", "gif", "webp"),
    "tests/unit/protocol/test_go.py::test_more_structure_than_any_request_has_is_refused_unread": ("keys", "lists"),
    "tests/unit/sampling/test_batch.py::test_a_row_draws_in_any_mix_what_it_draws_alone": (
        "1-64-*",
        "0-1000-*",
        "3-20011-*",
    ),
    "tests/unit/grammar/test_worker_pool.py::test_compiling_has_a_limit_of_time": NONE,
}


_MODELS = ("*a head*", "*an assistant*", "*groups*", "*every token*", "*blocks*")
"""Heads, assistants and DFlash drafts."""
ASIDE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "models-that-draft": {
        "tests/model/drafts/heads/": ALL,
        "tests/model/drafts/assistant/": ALL,
        "tests/model/drafts/dflash/": ALL,
        "tests/model/engine/test_drafts.py": _MODELS,
        "tests/model/engine/test_drafted.py": _MODELS,
        "tests/model/engine/test_not_numbers.py": _MODELS,
    },
    "ranks": {
        "tests/unit/ranks/": ALL,
        "tests/model/ranks/": ALL,
        "tests/model/engine/test_ranks.py": ALL,
        "tests/process/ranks/": ALL,
    },
}
"""The tiers of their own."""


def aside(nodeid: str) -> str:
    """The tier of its own that has this test; empty if it is one of the others."""
    path, _, rest = nodeid.partition("::")
    name, _, parameters = rest.partition("[")
    for tier, tests in ASIDE.items():
        for key in (f"{path}::{name}", path, f"{path.rpartition('/')[0]}/"):
            if key in tests and any(fnmatchcase(parameters.removesuffix("]"), pattern) for pattern in tests[key]):
                return tier
    return ""


def may_hold(tier: str, path: str) -> bool:
    """True unless a tier of its own has no test of this file."""
    return any(path.startswith(key) if key.endswith("/") else path == key.partition("::")[0] for key in ASIDE[tier])


def is_full_file(path: str) -> bool:
    """True if the table leaves all tests of this file to the full tier."""
    return FULL.get(path) == NONE and not any(key.startswith(f"{path}::") for key in FULL)


def is_full(nodeid: str) -> bool:
    """True if the table leaves this test to the full tier."""
    path, _, rest = nodeid.partition("::")
    name, _, parameters = rest.partition("[")
    parameters = parameters.removesuffix("]")
    kept = FULL.get(f"{path}::{name}", FULL.get(path))
    if kept is not None:
        return not any(fnmatchcase(parameters, pattern) for pattern in kept)
    return path.startswith("tests/model/") and not MIXTURES.isdisjoint(parameters.split("-"))
