"""Each mechanism of a CUDA kernel, broken on purpose, and the test that must notice.

    python tests/cuda_on_host/mutants.py [MUTANT...]

``mutant("name")`` in the sources says what breaks. The library of the suites holds all mutants;
each is chosen in a fork of its own, for some of them crash. Prints one JSON object: mutant -> what
pytest returned and printed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent

# Mutant: test of tests/*/test_<op>.py (run with backend cuda_on_host), schedule.
MUTANTS = {
    "allreduce_bf16_sum": ("allreduce_cuda", "test_case_35_sums_are_rounded_once", 0),
    "allreduce_block_epoch": ("allreduce_cuda", "test_tiles_change_hands_between_calls", 0),
    "allreduce_early_release": ("allreduce_cuda", "test_case_30_random_sequences_stay_exact", 0),
    "allreduce_host_epoch": ("allreduce_cuda", "test_case_32_replays_are_eager_calls", 0),
    "allreduce_no_bound": ("allreduce_cuda", "test_case_36_a_missing_rank_ends_the_call", 0),
    "allreduce_no_clear": (
        "allreduce_cuda",
        "test_case_31_back_to_back_calls_leave_nothing_stale",
        0,
    ),
    "allreduce_no_poison": ("allreduce_cuda", "test_case_36_a_missing_rank_ends_the_call", 0),
    "allreduce_old_flag": ("allreduce_cuda", "test_case_30_a_flag_of_long_ago_says_nothing", 0),
    "allreduce_norm_stale": ("allreduce_cuda", "test_case_30_fused_calls_among_others", 0),
    "allreduce_one_slot": (
        "allreduce_cuda",
        "test_case_31_back_to_back_calls_leave_nothing_stale",
        0,
    ),
    "allreduce_publish_anyway": ("allreduce_cuda", "test_case_36_a_missing_rank_ends_the_call", 0),
    "allreduce_pull_no_flag": (
        "allreduce_cuda",
        "test_case_31_back_to_back_calls_leave_nothing_stale",
        0,
    ),
    "allreduce_rank_rotated": (
        "allreduce_cuda",
        "test_case_34_the_same_bits_from_every_algorithm",
        0,
    ),
    "allreduce_sentinel_payload": (
        "allreduce_cuda",
        "test_words_that_equal_the_sentinel_arrive_as_nan",
        0,
    ),
    "allreduce_wrong_clear": (
        "allreduce_cuda",
        "test_case_31_back_to_back_calls_leave_nothing_stale",
        0,
    ),
    "compact_any_order": ("compact", "test_a_request_with_bad_values_moves_nowhere", 0),
    "compact_any_page": ("compact", "test_a_request_with_bad_values_moves_nowhere", 0),
    "compact_barrier": ("compact", "test_case_07_rows_0_3_4_5_come_to_the_front_in_every_layer", 1),
    "compact_descending": ("compact", "test_any_path_any_overlap", 0),
    "compact_padding": ("compact", "test_case_05_padding_moves_nothing", 0),
    "draft_sample_barrier": ("draft_sample", "test_the_tokens_are_those_of_the_rule", 1),
    "draft_sample_ordinal": ("draft_sample", "test_the_tokens_are_those_of_the_rule", 0),
    "draft_sample_overflow": ("draft_sample", "test_more_ties_than_any_list_takes", 0),
    "draft_sample_padding": (
        "draft_sample",
        "test_case_05_padded_and_greedy_requests_leave_probs",
        0,
    ),
    "draft_sample_replacement": ("draft_sample", "test_many_draws", 0),
    "draft_sample_scatter": ("draft_sample", "test_q_is_the_softmax_at_the_target_ids", 0),
    "hidden_capture_barrier": ("hidden_capture", "test_rows_do_not_depend_on_each_other", 3),
    "hidden_capture_before": (
        "hidden_capture",
        "test_case_23_the_captured_stream_is_the_one_normalised",
        0,
    ),
    "tree_build_absent": (
        "tree_build",
        "test_a_pool_smaller_than_the_tree_leaves_absent_nodes",
        0,
    ),
    "tree_build_any_parent": (
        "tree_build",
        "test_case_02_malformed_parent_is_unlinked_and_harms_nobody_else",
        0,
    ),
    "tree_build_barrier": ("tree_build", "test_case_03_visibility_is_right_beyond_one_word", 1),
    "tree_build_inheritance": ("tree_build", "test_chain", 0),
    "tree_build_links": ("tree_build", "test_static_tree_from_paths", 0),
    "tree_build_order": ("tree_build", "test_ranks_by_score_then_lower_index", 0),
    "tree_build_padding": ("tree_build", "test_chain_padded_at_its_end", 0),
    "tree_verify_barrier": ("tree_verify", "test_case_04_ids_stay_within_the_vocabulary", 1),
    "tree_verify_bound": ("tree_verify", "test_case_02_broken_links_end_the_walk", 0),
    "tree_verify_closed": ("tree_verify", "test_case_01_probability_zero_is_never_chosen", 0),
    "tree_verify_coins_children": (
        "tree_verify_coins",
        "test_distribution_is_exactly_the_targets",
        0,
    ),
    "tree_verify_coins_closed": ("tree_verify_coins", "test_case_01_coins_are_half_open", 0),
    "tree_verify_coins_draft": (
        "tree_verify_coins",
        "test_draft_probs_are_taken_from_the_last_row_only",
        0,
    ),
    "tree_verify_compact_barrier": (
        "tree_verify_compact",
        "test_case_07_rows_0_3_4_5_come_to_the_front",
        1,
    ),
    "tree_verify_cut_tie": ("tree_verify_cuda", "test_ties_that_no_list_takes", 0),
    "tree_verify_nan": ("tree_verify", "test_case_04_ids_stay_within_the_vocabulary", 0),
    "tree_verify_ordinal": (
        "tree_verify_drafts",
        "test_compiled_kernels_take_the_references_path",
        0,
    ),
    "tree_verify_padding": ("tree_verify", "test_case_05_padded_and_shrunk_batches", 0),
    "tree_verify_purpose": (
        "tree_verify_drafts",
        "test_compiled_kernels_take_the_references_path",
        0,
    ),
    "tree_verify_renormalise": (
        "tree_verify_drafts",
        "test_compiled_kernels_take_the_references_path",
        0,
    ),
    "tree_verify_tie_order": ("tree_verify", "test_ties_go_to_the_lower_id", 0),
    "tree_verify_upward": ("tree_verify", "test_case_02_links_upwards_cannot_go_round", 0),
}


def start(mutant: str, machine) -> tuple[int, Path]:
    """Forks; the child runs the mutant's test and exits with what pytest returns."""
    import pytest

    log = Path(tempfile.mkstemp(prefix=f"{mutant}-")[1])
    child = os.fork()
    if child:
        return child, log
    output = os.open(log, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    op, name, seed = MUTANTS[mutant]
    machine.library.choose_mutant(mutant.encode())
    machine.configure(seed)
    (suite,) = TESTS.glob(f"*/test_{op}.py")
    code = pytest.main(
        [f"{suite}::{name}", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
        + ["-k", "cuda_on_host", "--rootdir", str(TESTS.parent)]
    )
    sys.stdout.flush()
    os._exit(int(code))


def main() -> int:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    # Nothing may run in this process before the forks: threads would be missing in them.
    import hypothesis  # noqa: F401
    from cuda_on_host import host_build

    machine = host_build.load()
    waiting = list(sys.argv[1:] or MUTANTS)
    running: dict[int, tuple[str, Path]] = {}
    outcomes = {}
    while waiting or running:
        while waiting and len(running) < 2:
            mutant = waiting.pop(0)
            child, log = start(mutant, machine)
            running[child] = mutant, log
        child, status = os.wait()
        mutant, log = running.pop(child)
        outcomes[mutant] = [os.waitstatus_to_exitcode(status), log.read_text()]
        log.unlink()
    print(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
