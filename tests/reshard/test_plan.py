import pytest

from rlkit.reshard.plan import TensorFacts, plan_equal

FACTS = [
    TensorFacts("a", (4, 4), "float32"),
    TensorFacts("b", (2,), "bfloat16"),
    TensorFacts("c", (100,), "float32"),
]


def test_every_tensor_is_in_one_bucket_of_its_dtype():
    plan = plan_equal(FACTS, FACTS, num_targets=1, bucket_bytes=128)
    assert sorted(t.name for bucket in plan.buckets for t in bucket) == ["a", "b", "c"]
    assert all(len({t.dtype for t in bucket}) == 1 for bucket in plan.buckets)


def test_buckets_keep_the_limit_unless_one_tensor_is_larger():
    plan = plan_equal(FACTS, FACTS, num_targets=1, bucket_bytes=128)
    assert all(len(b) == 1 or sum(t.nbytes for t in b) <= 128 for b in plan.buckets)


def test_bytes_count_every_target():
    assert plan_equal(FACTS, FACTS, num_targets=3, bucket_bytes=999).nbytes == 3 * (64 + 4 + 400)


def test_another_shape_at_the_target_is_named():
    other = [*FACTS[:2], TensorFacts("c", (99,), "float32")]
    with pytest.raises(ValueError, match=r"c is \(100,\) at the source and \(99,\)"):
        plan_equal(FACTS, other, num_targets=1, bucket_bytes=128)


def test_frame_has_a_row_a_tensor():
    assert len(plan_equal(FACTS, FACTS, num_targets=2, bucket_bytes=128).frame()) == 3
