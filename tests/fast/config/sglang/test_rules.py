"""Which engine generates, on which devices, and which flags it accepts."""

import pytest

SGLANG = "--rollout-engine sglang --actor-num-gpus-per-node 2 "
EXTERNAL = SGLANG + "--rollout-external --rollout-external-engine-addrs h:1 "


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--rollout-engine torch --sglang-dtype float32", "--sglang-dtype: would be ignored by --rollout-engine torch"),
        (
            "--rollout-engine torch --router-policy random",
            "--router-policy: would be ignored by --rollout-engine torch",
        ),
        (SGLANG + "--sglang-max-total-token 3", "did you mean --sglang-max-total-tokens"),
        (SGLANG + "--rollout-num-gpus 2 --router-polcy random", "did you mean --router-policy"),
        (SGLANG + "--sglang-enable-custom-all-reduce", "no such flag; drop --sglang-enable-custom-all-reduce"),
        (SGLANG + "--sglang-disable-metrics", "no such flag; drop --sglang-disable-metrics"),
        (SGLANG + "--sglang-port 1", "--sglang-port: the launcher sets it"),
        (SGLANG + "--sglang-tp-size 4", "give --rollout-num-gpus-per-engine 4"),
        (SGLANG + "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "give a divisor of 3"),
        (SGLANG + "--colocate --rollout-num-gpus-per-engine 3", "give a divisor of 2"),
        (
            SGLANG + "--colocate --actor-num-nodes 3 --rollout-num-gpus-per-engine 3",
            "--rollout-num-gpus-per-engine 3: an engine lies within a node or has whole nodes, and a node has "
            "--actor-num-gpus-per-node 2; give a divisor or a multiple of 2",
        ),
        (
            SGLANG + "--rollout-num-gpus-per-engine 12",
            "--num-gpus-per-node 8; give a divisor or a multiple of 8, or the",
        ),
        (
            SGLANG + "--rollout-num-gpus-per-engine 4 --num-gpus-per-node 2 --update-weight-transfer-mode ipc",
            "no memory is shared between nodes; use --update-weight-transfer-mode broadcast",
        ),
        (SGLANG + "--rollout-external", "needs --rollout-external-engine-addrs"),
        (SGLANG + "--rollout-external --rollout-external-engine-addrs h:1 host", "is not HOST:PORT"),
        (
            SGLANG + "--rollout-external --rollout-external-engine-addrs h:1 --sglang-dtype x",
            "whose engines are already running",
        ),
        (SGLANG + "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "or --rollout-num-gpus 4"),
        (SGLANG + "--sglang-pp-size 2", "--sglang-pp-size 2: an engine here is tensor parallel"),
        (SGLANG + "--sglang-data-parallel-size=2", "each is an engine here, and 2 of them need 2 devices"),
        (SGLANG + "--sglang-nnodes 2", "for more devices per engine give --rollout-num-gpus-per-engine,"),
        (SGLANG + "--sglang-pp-size 2 --sglang-enable-dp-attention", "--sglang-pp-size 2"),
        (SGLANG + "--sglang-quantization fp8", "--sglang-quantization fp8: SGLang quantizes weights when it starts"),
        (SGLANG + "--sglang-disaggregation-mode decode", "each engine here does both; drop it"),
        (SGLANG + "--sglang-base-gpu-id 1", "--sglang-base-gpu-id: the launcher sets it"),
        (SGLANG + "--rollout-health-check-interval 0", "above 0"),
        (SGLANG + "--engine-log-max-mb 0", "above 0"),
        (SGLANG + "--worker-timeout 0", "--worker-timeout 0.0: must be a finite number above 0"),
        (SGLANG + "--use-fault-tolerance --rollout-health-check-timeout 0", "above 0"),
        (
            EXTERNAL + "--update-weight-transfer-mode disk-delta",
            "could apply a delta; use --update-weight-transfer-mode disk",
        ),
        (
            SGLANG + "--fully-async --async-steps 1 --pause-generation-mode abort",
            "--pause-generation-mode abort: would end the requests in flight, which --fully-async continues with the "
            "new weights; give retract or in_place",
        ),
        (SGLANG + "--sglang-tokenizer-worker-num 2", "--sglang-tokenizer-worker-num: SGLang would answer everybody"),
        (SGLANG + "--sglang-grpc-port 5", "--sglang-grpc-port: SGLang would answer everybody"),
        (SGLANG + "--sglang-api-key", "--sglang-api-key: a key must be one word"),
        (SGLANG + "--sglang-admin-api-key=sés", "--sglang-admin-api-key: a key must be one word"),
        (SGLANG + "--rollout-num-gpus 2 --router-api-key ø", "--router-api-key: a key must be one word"),
    ],
)
def test_refused_with_one_error(refused, flags, expected):
    (message,) = refused(flags)
    assert expected in message


@pytest.mark.parametrize(
    ("flags", "engines"),
    [
        ("", 0),
        ("--rollout-engine sglang", 1),
        ("--rollout-engine sglang --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 --sglang-tp-size 2", 2),
        ("--rollout-engine sglang --rollout-num-gpus-per-engine 2", 1),
        ("--rollout-engine sglang --sglang-pp-size 1 --sglang-dp-size 1", 1),
        (SGLANG + "--rollout-num-gpus-per-engine 16 --rollout-num-gpus 32", 2),
        (SGLANG + "--rollout-num-gpus-per-engine 2 --sglang-enable-dp-attention --sglang-attn-dp-size 2", 1),
        (SGLANG + "--colocate", 2),
        (SGLANG + "--rollout-external --rollout-external-engine-addrs h:1 h:2", 0),
        (
            SGLANG
            + "--rollout-external --rollout-external-engine-addrs h:1 --sglang-api-key k --sglang-admin-api-key l",
            0,
        ),
        (SGLANG + "--sglang-api-key k --sglang-tokenizer-worker-num 1", 1),
    ],
)
def test_number_of_engines(validated, flags, engines):
    assert validated(flags).settings.num_engines == engines


def test_abort_is_retract_where_nothing_is_in_flight(validated):
    read = validated(SGLANG + "--async-steps 1 --pause-generation-mode abort")
    assert read.settings.sglang.pause_generation_mode == "retract" and not read.settings.sglang.keeps_cache
    assert any("abort is read as retract: without --fully-async" in note for note in read.notes)


def test_own_flags_that_start_like_sglangs_stay_ours(validated):
    sglang = validated(SGLANG + "--sglang-server-concurrency 7").settings.sglang
    assert sglang.sglang_server_concurrency == 7


@pytest.mark.parametrize("engine", ["--rollout-engine torch ", SGLANG])
def test_both_engines_are_sent_deltas_if_something_is_generated(validated, engine):
    flags = engine + "--update-weight-transfer-mode disk-delta --update-weight-disk-dir d --update-weight-copy-dir c"
    settings = validated(flags).settings
    assert settings.sends_deltas and str(settings.weights_folder) == "d"
    assert not validated(engine).settings.sends_deltas
