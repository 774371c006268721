"""A rehearsal's figures equal a run's: sizes by counting, FLOP by torch's counter, allocations by its profiler."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_scripts import run_checks
from rehearsed_layouts import FSDP, LAYOUTS, MEGATRON, Layout, save_135m, save_models
from tiny_kinds import CONFIGS, config_of
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_models import write_vision_model

from miles.base.flags import FlagError
from miles.commands.rehearsal import command as rehearsal_command
from miles.commands.rehearsal import rehearsal as rehearsals
from miles.commands.rehearsal.meter import MemoryKind, Phase
from miles.commands.rehearsal.rehearsal import model_size, rehearse_settings, total
from miles.commands.rehearsal.report import as_json as figures_of
from miles.commands.rehearsal.report import as_page, as_text, one_forward_one_backward
from miles.commands.rehearsal.roofline import KNOWN, device_of, foresee_generation
from miles.commands.rehearsal.trace import Tracers, prompt_length, response_length, step_of_one_rank
from miles.compat.border import parse_or_exit
from miles.config.lora import LoraArguments
from miles.config.megatron.settings import MegatronArguments
from miles.config.model import ModelArguments
from miles.config.rehearsal import RehearsalArguments
from miles.config.servers.passed_on import ServerFlags
from miles.config.training import TrainingArguments
from miles.config.validate import validate
from miles.models.registry import CONVERTED
from miles.run.launcher import FORESEEN, MEASURED, ForeseenMemory, foreseen_memory
from miles.types.metrics import Metric
from tests.fast.commands.rehearsal.agreement import figures


def test_an_fsdp_run(tmp_path):
    save_models(tmp_path, weights=False)
    base = FSDP["fsdp, 2 ranks"].settings(tmp_path)
    section = RehearsalArguments(rehearse=True, gpu_memory=3.0)
    settings = validate(replace(base, rehearsal=section)).settings
    rehearsal = rehearse_settings(settings, Tracers())
    (rank,) = rehearsal.ranks
    part = 4 * rehearsal.size.parameters / 2
    assert rank.trace.resident[MemoryKind.WEIGHTS] == pytest.approx(part, rel=0.05)
    assert rank.trace.peaks[Phase.BUILD][MemoryKind.WEIGHTS] == pytest.approx(part, rel=0.05), (
        "no rank holds a whole model"
    )
    assert rank.trace.resident[MemoryKind.OPTIMIZER] == pytest.approx(2 * part, rel=0.05)  # 512 bytes at once
    assert rank.trace.peaks[Phase.TRAIN][MemoryKind.GRADIENTS] >= part * 0.98
    size = AutoConfig.from_pretrained(settings.model.hf_checkpoint)
    chunk = settings.training.micro_batch_size * 96 * size.vocab_size * 4
    assert chunk <= rank.trace.peaks[Phase.TRAIN][MemoryKind.LOGITS] <= 4 * chunk
    tokens = settings.global_batch_size * (96 + 40 / 2) / 2  # two answers share a prompt
    assert rank.trace.step_tokens == tokens, "utilization counts no token that is not computed"
    assert 6 * rehearsal.size.active * tokens * 0.7 < rank.trace.tallies[Phase.TRAIN].flops
    sent = rank.trace.tallies[Phase.TRAIN].messages
    gathered = sum(message.bytes * n for message, n in sent.items() if "allgather" in message.name)
    assert gathered == pytest.approx(4 * rehearsal.size.parameters * 2 * (1 + 7 / 9), rel=0.4)
    text = as_text(rehearsal, [], 1.0)
    assert "FITS: rank 0" in text and "canary       the weights of all tokens must add up to 1" in text
    figures = json.loads(json.dumps(figures_of(rehearsal, [], 1.0)))
    assert figures["fits"] and figures["ranks"][0]["peak_bytes"] == total(
        rank.phases[figures["ranks"][0]["peak_phase"]]
    )
    assert "<svg" in as_page(rehearsal, [], 1.0)
    needs_more = replace(rehearsal, memory=1)
    assert "DOES NOT FIT" in as_text(needs_more, [], 1.0)


def test_a_vision_tower_and_the_tokens_of_images_are_counted(tmp_path):
    write_vision_model(tmp_path / "vision", "qwen2_5_vl")
    text = validate(Layout(2, model="vision").settings(tmp_path)).settings

    def rehearsed(side, **training):
        data = replace(text.data, multimodal_keys='{"image": "images"}', image_max_pixels=side * side)
        return rehearse_settings(replace(text, data=data, training=replace(text.training, **training)), Tracers())

    small, large, frozen = rehearsed(16), rehearsed(32), rehearsed(32, freeze_vision_tower=True)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path / "vision"))
    weights = list(model.model.visual.parameters())
    tower = sum(weight.numel() for weight in weights)
    assert large.size.parameters == model.num_parameters() and large.size.active <= model.num_parameters() - tower
    flops = [rehearsal.worst.trace.tallies[Phase.TRAIN].flops for rehearsal in (small, large, frozen)]
    assert flops[0] < flops[1] and flops[2] < flops[1]
    rows = [-(-len(weight) // 2) * weight[0].numel() for weight in weights]  # of each on the first of two ranks
    states = sum(2 * -(-4 * size // 512) * 512 + 512 for size in rows)  # two moments and the step, 512 bytes at once
    moments = [rehearsal.worst.trace.resident[MemoryKind.OPTIMIZER] for rehearsal in (large, frozen)]
    assert moments[0] - moments[1] == states
    report = as_text(large, [], 1.0)
    assert "40 tokens of prompt, 16 of them of an image" in report and "32 x 32 pixels; 9.16e-05 GiB" in report
    with pytest.raises(ValueError, match=r"an image of 64 x 64 pixels takes 64 tokens.* --rehearse-prompt-len"):
        rehearsed(64)


def test_ranks_are_on_the_nodes_of_the_command(tmp_path):
    save_models(tmp_path, weights=False)
    base = FSDP["fsdp, 2 ranks"].settings(tmp_path)
    texts = {}
    for nodes, per_node in ((1, 2), (2, 1)):
        cluster = replace(base.cluster, actor_num_nodes=nodes, actor_num_gpus_per_node=per_node)
        rehearsal = rehearse_settings(validate(replace(base, cluster=cluster)).settings, Tracers())
        texts[nodes] = as_text(rehearsal, [], 1.0)
    assert "allgather of 2 ranks in a node" in texts[1] and "over nodes" not in texts[1]
    assert "allgather of 2 ranks over nodes" in texts[2] and "ranks in a node" not in texts[2]


def test_an_adapter_leaves_one_model_without_optimizer_and_a_teacher_adds_one(tmp_path):
    save_models(tmp_path, weights=False)
    base = FSDP["fsdp, 2 ranks"].settings(tmp_path)
    loss = replace(base.loss, use_kl_loss=True, use_opd=True)
    model = replace(base.model, opd_teacher_load=base.model.hf_checkpoint)
    lora = LoraArguments(lora_rank=4, target_modules=("q_proj",))
    settings = validate(replace(base, model=model, lora=lora, loss=loss)).settings
    rehearsal = rehearse_settings(settings, Tracers())
    (rank,) = rehearsal.ranks
    config = AutoConfig.from_pretrained(settings.model.hf_checkpoint)
    out = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    adapter = config.num_hidden_layers * 4 * (config.hidden_size + out) * 4 / 2  # bytes on one of two ranks
    whole = 4 * rehearsal.size.parameters / 2
    assert rank.trace.resident[MemoryKind.OPTIMIZER] == pytest.approx(2 * adapter, rel=0.5)  # 512 bytes at once
    assert rank.trace.resident[MemoryKind.OPTIMIZER] < whole / 4
    assert rank.trace.resident[MemoryKind.WEIGHTS] == pytest.approx(2 * whole + adapter, rel=0.05), "policy and teacher"


@pytest.mark.slow
def test_megatron_holds_an_adapters_state_and_an_optimizer_in_host_memory_holds_none(tmp_path):
    save_models(tmp_path, weights=False)
    base = next(iter(MEGATRON.values())).settings(tmp_path)
    base = replace(base, cluster=replace(base.cluster, device="cuda"))  # elsewhere the flag changes nothing
    offload = replace(base.megatron, optimizer_cpu_offload=True)
    held = {}
    for name, changed in {
        "all": base,
        "adapter": replace(base, lora=LoraArguments(lora_rank=4, target_modules=("q_proj", "o_proj"))),
        "offloaded": replace(base, megatron=offload),
    }.items():
        rehearsal = rehearse_settings(validate(changed).settings, Tracers())
        held[name] = rehearsal.ranks[0].phases[Phase.TRAIN].get(MemoryKind.OPTIMIZER, 0)
    assert 0 < held["adapter"] < held["all"] / 4
    assert held["offloaded"] == 0


@pytest.mark.slow
def test_a_rank_of_an_interleaved_pipeline_holds_its_parts_of_the_model(tmp_path):
    save_models(tmp_path, weights=False)
    base = MEGATRON["megatron, PP 3, interleaved"].settings(tmp_path)
    held = []
    for each in (None, 1):
        sizes = replace(base.megatron, num_layers_per_virtual_pipeline_stage=each)
        rehearsal = rehearse_settings(validate(replace(base, megatron=sizes)).settings, Tracers())
        held.append([rank.trace.weight_bytes for rank in rehearsal.ranks])
    assert held[0] == held[1], "as many layers on each stage, and the embedding and the head on the same ones"
    assert (rehearsal.chunks, rehearsal.bubble) == (2, 2 / (rehearsal.worst.trace.micro_batches * 2 + 2))
    assert "part 2 of 2" in as_page(rehearsal, [], 1.0)


@pytest.mark.slow
def test_a_run_on_gpus_logs_foreseen_memory_beside_what_it_measures(tmp_path, capfd):
    save_models(tmp_path, weights=False)
    settings = validate(FSDP["fsdp, 2 ranks"].settings(tmp_path)).settings
    measured = {MEASURED: Metric(1.5)}
    with foreseen_memory(settings, "cpu") as nothing, foreseen_memory(settings, "cuda") as foreseen:
        assert nothing is None and foreseen is not None
        foreseen._process.wait()
        (logged,) = foreseen.compare(measured).items()
        assert foreseen.compare(measured) == dict([logged])
    trace = rehearse_settings(settings, Tracers()).ranks[0].trace
    peak = max(total(usage) for phase, usage in trace.peaks.items() if phase is not Phase.BUILD)
    assert (logged[0], logged[1].value) == (FORESEEN, peak / 2**30)
    assert capfd.readouterr().err.count("the fullest trainer rank has allocated 1.5 GiB; --rehearse foresees 0.0") == 1


@pytest.mark.slow
def test_a_rehearsal_beside_a_run_that_fails_is_noted_and_nothing_is_logged(tmp_path, capfd):
    settings = FSDP["fsdp, 2 ranks"].settings(tmp_path / "nothing")
    with closing(ForeseenMemory(settings)) as foreseen:
        foreseen._process.wait()
        assert foreseen.compare({MEASURED: Metric(1.5)}) == {}
    assert "--rehearse cannot foresee it: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("stages", "count", "chunks"), [(1, 3, 1), (2, 4, 1), (4, 8, 1), (4, 2, 1), (4, 8, 2), (2, 2, 3)]
)
def test_the_picture_of_the_schedule_has_the_bubble_of_the_formula(stages, count, chunks):
    tasks = list(one_forward_one_backward(stages, count, chunks))
    assert len({(t.stage, t.is_forward, t.number, t.chunk) for t in tasks}) == len(tasks) == 2 * stages * count * chunks
    end = max(task.start + task.length for task in tasks)
    assert end == 3 * (count * chunks + stages - 1)
    for stage in range(stages):
        mine = sorted((task.start, task.start + task.length) for task in tasks if task.stage == stage)
        assert all(end <= start for (_, end), (start, _) in zip(mine, mine[1:], strict=False))


def test_a_device_file_replaces_figures_of_a_known_device(tmp_path):
    file = tmp_path / "device.json"
    file.write_text('{"base": "h100", "bf16": 600}')
    assert device_of(str(file)) == replace(KNOWN["h100"], name="H100 80 GB, measured", bf16=600)
    file.write_text(json.dumps(asdict(KNOWN["a100"])))
    assert device_of(str(file)) == KNOWN["a100"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[]", "is not a JSON object"),
        ("{", "cannot be read"),
        ('{"speed": 3}', "has unknown fields: speed"),
        ('{"base": "h100", "bf16": -1}', "bf16 must be numbers above 0"),
        ('{"base": "abacus"}', "base 'abacus' is not known"),
        ('{"base": ["h100"]}', "base .* is not known"),
        ('{"name": "x"}', "lacks bandwidth"),
    ],
)
def test_a_device_file_that_is_wrong_is_refused(tmp_path, text, rule):
    file = tmp_path / "device.json"
    file.write_text(text)
    with pytest.raises(FlagError, match=rule):
        device_of(str(file))


def test_samples_have_the_assumed_lengths_and_the_page_is_written(tmp_path, monkeypatch, capsys):
    save_models(tmp_path, weights=False)
    page = tmp_path / "page.html"
    lengths = RehearsalArguments(rehearse=True, rehearse_prompt_len=9, rehearse_response_len=5, rehearse_page=str(page))
    settings = replace(FSDP["fsdp, 2 ranks"].settings(tmp_path), rehearsal=lengths)
    assert {*step_of_one_rank(settings).batch.total_lengths} == {14}
    for name in ("rehearse_settings", "advise", "as_text", "as_json"):
        monkeypatch.setattr(rehearsal_command, name, lambda *_: [])
    monkeypatch.setattr(rehearsal_command, "as_page", lambda *_: "<page>")
    assert rehearsal_command.rehearse(SimpleNamespace(settings=settings, notes=())) == 0
    assert page.read_text() == "<page>"
    full = replace(lengths, rehearse_json="/dev/full")
    assert rehearsal_command.rehearse(SimpleNamespace(settings=replace(settings, rehearsal=full), notes=())) == 1
    assert "/dev/full: cannot be written (No space left on device); give another path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "max_prompt_len", "lengths"),
    [
        ({}, 40, (40, 56)),
        ({}, None, (24, 72)),  # a quarter of the context
        (dict(rehearse_prompt_len=90), 40, (90, 6)),
        (dict(rehearse_response_len=80), None, (16, 80)),
        (dict(rehearse_response_len=20), 40, (40, 20)),
    ],
)
def test_a_response_ends_where_the_context_does(tmp_path, arguments, max_prompt_len, lengths):
    settings = FSDP["fsdp, 1 rank"].settings(tmp_path)  # with responses of at most 96 tokens
    settings = replace(
        settings,
        rollout=replace(settings.rollout, rollout_max_context_len=96),
        data=replace(settings.data, rollout_max_prompt_len=max_prompt_len),
        rehearsal=RehearsalArguments(rehearse=True, **arguments),
    )
    assert (prompt_length(settings), response_length(settings)) == lengths


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--rehearse", "--rollout-max-context-len", "96", "--rehearse-prompt-len", "96"],
            "--rehearse-prompt-len 96: with 1 token alongside it is more than --rollout-max-context-len 96",
        ),
        (
            ["--rehearse", "--rollout-max-context-len", "96", "--rehearse-response-len", "200"],
            "--rehearse-response-len 200: with 1 token alongside it is more than --rollout-max-context-len 96",
        ),
        (["--rehearse", "--gpu-memory", "0"], "--gpu-memory 0"),
        (["--rehearse", "--rehearse-json", "no/such/x.json"], "its folder does not exist"),
        (["--rehearse", "--rehearse-page", "."], "--rehearse-page .: is a folder; give the path of a file"),
    ],
)
def test_wrong_flags_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(flags)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@dataclass(frozen=True)
class MeasuredLayouts:
    """The folder of what was measured, and why some of it was not, by layout."""

    folder: Path
    failed: dict[str, str]


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MeasuredLayouts:
    """Run the layouts that are selected."""
    items = [item for item in request.session.items if "measured" in getattr(item, "fixturenames", ())]
    selected = {item.callspec.params["name"] for item in items}  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("measured")
    torch.manual_seed(0)
    save_models(folder, weights=True)
    if any(LAYOUTS[name].model == "135M" for name in selected):
        save_135m(folder)
    failed: dict[str, str] = {}
    for group in (FSDP, MEGATRON):
        script = Path(__file__).with_name("measured.py")
        names = [name for name in group if name in selected]
        failed |= run_checks(script, folder, *names, seconds=7200) if names else {}
    return MeasuredLayouts(folder, failed)


@pytest.mark.slow
@pytest.mark.timeout(14400)  # the first test waits for the ranks of all layouts
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_flop_and_traffic_are_those_of_a_run(name: str, measured: MeasuredLayouts) -> None:
    assert not measured.failed[name]
    distant = [figure for figure in figures(name, measured.folder) if figure.distance > figure.tolerance]
    assert not distant


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kind"),
    [("fsdp", kind) for kind in CONFIGS] + [("megatron", kind) for kind in CONFIGS if kind in CONVERTED],
)
def test_every_family_that_a_backend_trains_is_rehearsed(backend: str, kind: str, tmp_path: Path) -> None:
    config_of(kind).save_pretrained(tmp_path / kind)
    rehearsal = rehearse_settings(validate(Layout(2, backend, model=kind).settings(tmp_path)).settings, Tracers())
    assert rehearsal.worst.trace.tallies[Phase.TRAIN].flops > 2 * rehearsal.worst.trace.tokens * rehearsal.size.active
    assert rehearsal.worst.trace.peaks[Phase.TRAIN][MemoryKind.ACTIVATIONS] > 0


def test_an_engine_has_the_precision_of_the_run(tmp_path):
    settings = FSDP["fsdp, 1 rank"].settings(tmp_path)
    half = replace(settings, training=replace(settings.training, fp32=False, bf16=True))
    config = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    engines = [foresee_generation(s, config, 1000, 1000, KNOWN["h100"], 80 * 2**30) for s in (settings, half)]
    assert [(f.weight_bytes, f.kv_bytes_per_token) for f in engines] == [(4000, 2048), (2000, 1024)]


def test_an_engine_has_the_cache_and_the_requests_of_its_flags(tmp_path):
    settings = FSDP["fsdp, 1 rank"].settings(tmp_path)
    config = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    by_flags = {}
    for words in ((), ("--kv-cache-dtype", "fp8_e4m3"), ("--kv-cache-dtype=auto",), ("--max-running-requests", "1")):
        variant = replace(settings, server_flags=ServerFlags(server=words))
        engine = foresee_generation(variant, config, 1000, 1000, KNOWN["h100"], 80 * 2**30)
        by_flags[" ".join(words)] = (engine.kv_bytes_per_token, engine.sequences)
    everything = by_flags[""][1]
    assert everything > 1
    assert list(by_flags.values()) == [(2048, everything), (512, everything), (2048, everything), (2048, 1)]


def test_an_engine_has_the_share_of_memory_that_its_flag_says(tmp_path):
    settings = FSDP["fsdp, 1 rank"].settings(tmp_path)
    settings = replace(settings, training=replace(settings.training, fp32=False, bf16=True))
    config = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    device, numbers = 8 * 2**30, 2**30
    caches = []
    for words in ((), ("--mem-fraction-static", "0.5"), ("--mem-fraction-static=0.25",)):
        variant = replace(settings, server_flags=ServerFlags(server=words))
        answers = replace(settings.rollout, rollout_max_response_len=2**22)  # no device has room for all
        engine = foresee_generation(replace(variant, rollout=answers), config, numbers, numbers, KNOWN["h100"], device)
        caches.append(engine.cache_bytes / 2**30)
    assert caches == [pytest.approx(7.2 - 2 - 3), 2, 0]


def test_stages_are_cut_by_their_sizes_and_all_of_a_change_are_traced(tmp_path, monkeypatch):
    def settings(stages, **sizes):
        megatron = MegatronArguments(pipeline_model_parallel_size=stages, **sizes)
        return SimpleNamespace(megatron=megatron, model=ModelArguments(hf_checkpoint=str(tmp_path / "dense")))

    shape = {"num_layers": 8, "moe_layer_freq": [0, 0, 0, 1, 1, 1, 1, 1]}
    monkeypatch.setattr(rehearsals, "megatron_shape", lambda config: shape)
    config = {"model_type": next(iter(CONVERTED))}
    assert rehearsals._stages(settings(4), config) == [0, 1, 2, 3]
    layer_counts = dict(decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=1)
    assert rehearsals._stages(settings(4, **layer_counts), config) == [0, 1, 3]

    save_models(tmp_path, weights=False)
    assert rehearsals.stages_of_change(settings(4)) == [0, 1, 2, 3], "more dense layers on the first stage than others"
    shape["moe_layer_freq"] = [1] * 8
    assert rehearsals.stages_of_change(settings(4)) == [0, 3], "the others have the layers of the first"


def test_changes_are_traced_beside_each_other_and_those_that_are_refused_are_left_out(tmp_path, monkeypatch):
    save_models(tmp_path, weights=False)
    settings = validate(FSDP["fsdp, 2 ranks"].settings(tmp_path)).settings
    rehearsal = rehearse_settings(settings, Tracers())
    tried = list(rehearsals.changes(settings))[:2]
    monkeypatch.setattr(rehearsals, "changes", lambda argument: tried)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    one_by_one = list(rehearsals.advise(rehearsal, Tracers()))
    assert one_by_one and all(advice.peak < rehearsal.worst.peak for advice in one_by_one)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    for has_gpu in (False, True):  # with one, no rank is traced before the fork
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        with Tracers() as tracers:
            assert list(rehearsals.advise(rehearsal, tracers)) == one_by_one
    larger = replace(settings, cluster=replace(settings.cluster, actor_num_nodes=2))
    refused = SimpleNamespace(words="--none", applied=lambda argument: larger)
    monkeypatch.setattr(rehearsals, "changes", lambda argument: [refused])
    refusing = SimpleNamespace(trace=lambda jobs: ["cannot be rehearsed"] * len(jobs))
    assert list(rehearsals.advise(rehearsal, refusing)) == []


def test_changes_that_leave_the_worst_rank_as_it_is_are_not_traced(tmp_path):
    save_models(tmp_path, weights=False)
    base = MEGATRON["megatron, PP 2"].settings(tmp_path)
    training = TrainingArguments(
        train_backend="megatron", fp32=True, global_batch_size=8, use_dynamic_batch_size=True, max_tokens_per_gpu=300
    )
    settings = validate(replace(base, training=training)).settings
    ranks = [SimpleNamespace(stage=stage) for stage in (0, 1)]
    by_stage = [SimpleNamespace(settings=settings, worst=rank, stages=2) for rank in ranks]
    chunks = replace(settings, loss=replace(settings.loss, log_probs_chunk_size=8))
    assert [rehearsals._leaves_worst_rank(each, chunks) for each in by_stage] == [True, False]
    entropy = replace(chunks, loss=replace(chunks.loss, entropy_coef=0.1))
    assert not rehearsals._leaves_worst_rank(by_stage[0], entropy)
    for tokens, leaves in ((299, True), (136, False), (100, False)):  # two samples, of 136 tokens each; then one
        fewer = replace(settings, training=replace(settings.training, max_tokens_per_gpu=tokens))
        assert rehearsals._leaves_worst_rank(by_stage[1], fewer) == leaves
    one = replace(settings, training=replace(settings.training, max_tokens_per_gpu=136))
    none = replace(settings, training=replace(settings.training, max_tokens_per_gpu=68))
    assert rehearsals._leaves_worst_rank(SimpleNamespace(settings=one, worst=ranks[0], stages=2), none)
    assert not rehearsals._leaves_worst_rank(by_stage[0], replace(settings, cluster=None))


@pytest.mark.slow
def test_advice_is_that_of_tracing_every_stage_of_every_change(tmp_path):
    save_models(tmp_path, weights=False)
    with Tracers() as tracers:
        settings = validate(MEGATRON["megatron, PP 2"].settings(tmp_path)).settings
        rehearsal = rehearse_settings(settings, tracers)
        peaks = []
        for change in rehearsals.changes(rehearsal.settings):
            with suppress(FlagError, ValueError):
                peaks.append(rehearse_settings(change.applied(rehearsal.settings), tracers).worst.peak)
        best = [peak for peak in sorted(peaks)[: rehearsals.ADVICE] if peak < rehearsal.worst.peak]
        assert best and [advice.peak for advice in rehearsals.advise(rehearsal, tracers)] == best


def test_active_parameters_are_those_of_the_chosen_experts(tmp_path):
    save_models(tmp_path, weights=False)
    size = model_size(AutoConfig.from_pretrained(tmp_path / "experts"))
    of_experts = 4 * 4 * 3 * 64 * 32  # layers, experts, matrices
    assert size.experts == 4
    assert size.parameters - size.active == of_experts / 2 + 512 * 64
