"""Trajectories in environments: the text that the model reads, the trained tokens, and how they end and fail."""

import asyncio
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from miles.base import user_code
from miles.base.text import InputError
from miles.base.user_code import UserCodeError, run_blocking
from miles.config.settings import Settings
from miles.engine.base import SamplingParams
from miles.rollout.agents.environments import EnvironmentGenerator
from miles.rollout.groups import GroupSpec, response_seed
from miles.tasks.environments.base import Environment, ToolEnvironment, content_of_call
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.scoring import RewardError, score
from miles.types.sample import NO_WEIGHTS, Prompt, PromptGroup, SampleStatus

CALL = '<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>'


class Shop(ToolEnvironment):
    """Knows prices; pays for the right one."""

    asked: list[str]

    def functions(self):
        self.asked = []

        def price(item: str) -> int:
            """Look up a price.

            Args:
                item: The item to buy.
            """
            self.asked.append(item)
            return {"pear": 7}[item]

        return [price]

    async def reward(self):
        return float(self.answer == self.prompt.label)


class Echo(Environment):
    """Repeats what was said, for ever."""

    def __init__(self, prompt):
        self.turns = 0

    async def reset(self):
        return [{"role": "user", "content": "begin"}]

    async def step(self, answer):
        self.turns += 1
        return [{"role": "user", "content": answer["content"]}]

    async def reward(self):
        return self.turns


class Raises(Echo):
    async def step(self, answer):
        raise OSError("no board")


class Cancels(Echo):
    async def step(self, answer):
        raise asyncio.CancelledError


class Exits(Echo):
    async def step(self, answer):
        raise SystemExit(2)


class ExitsAtOnce(Echo):
    def __init__(self, prompt):
        raise SystemExit(2)


class Wordless(Echo):
    async def step(self, answer):
        raise Silently


class Silently(Exception):
    def __str__(self):
        raise ValueError


class Hangs(Echo):
    async def step(self, answer):
        await asyncio.Event().wait()


class Blocks(Shop):
    """Its tool returns once the test has ended."""

    end = threading.Event()

    def functions(self):
        def price(item: str) -> bool:
            """Look up a price.

            Args:
                item: The item to buy.
            """
            return self.end.wait()

        return [price]


class Waits(Echo):
    """Waits for a thread, while another call has the only one."""

    async def play(self, model):
        await model.answer([{"role": "user", "content": "begin"}])
        end, session = threading.Event(), model._session
        both = [asyncio.ensure_future(run_blocking(call)) for call in (end.wait, end.is_set)]
        async with asyncio.timeout(30):
            while session.idle.is_set():
                await asyncio.sleep(0)
        end.set()
        await asyncio.gather(*both)
        return float(session.idle.is_set())


class Unscored(Echo):
    async def step(self, answer):
        return ()

    async def reward(self):
        return float("nan")


class Silent(Echo):
    async def play(self, model):
        return 1.0


def no_environment(prompt):
    return prompt


def generator(name, **flags):
    settings = Settings()
    return EnvironmentGenerator(replace(settings, rollout=replace(settings.rollout, environment=name, **flags)))


async def played(made, engine, tokenizer, prompt=None, n_samples=1, max_new=1000, max_context=2000):
    prompt = prompt or Prompt("a pear", (1, 2), "7", {}, "set.jsonl:7", input="a pear")
    try:
        spec = GroupSpec(SamplingParams(max_new), n_samples, partial(response_seed, 1), max_context)
        return await asyncio.wait_for(made(PromptGroup(5, prompt), engine, tokenizer, spec), 60)
    finally:
        await made.close()


async def test_a_tool_is_shown_called_and_read_and_only_sampled_tokens_are_trained_on(random_engine, chat_tokenizer):
    engine = random_engine(texts=[CALL, "7"])
    group = await played(generator(f"{__name__}:Shop"), engine, chat_tokenizer)
    [sample] = group.samples
    whole = chat_tokenizer.decode(sample.tokens)
    assert '"name": "price"' in sample.prompt.text and "The item to buy." in sample.prompt.text
    assert whole.endswith(
        f"assistant\n{CALL}<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    )
    trained = [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert chat_tokenizer.decode(trained) == f"{CALL}<|im_end|>7<|im_end|>"
    for mask, log_prob, version in zip(sample.loss_mask, sample.rollout_log_probs, sample.weight_versions, strict=True):
        assert (log_prob < 0) == (mask == 1) == (version != NO_WEIGHTS)
    assert (sample.response, sample.environment_reward, sample.status) == ("7", 1.0, SampleStatus.COMPLETED)
    assert await score(group.samples, REWARDS["environment"].build(None) and _scored, None) == 0
    assert sample.reward == 1.0


TOOL_CALLS = """
SPECS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]
seen = []

def specs():
    return SPECS

def exits_at_specs():
    raise SystemExit(2)

async def call(name, arguments):
    seen.append((name, arguments))
    return {"pear": 7}[arguments["item"]]

def fails(name, arguments):
    raise OSError("closed")

class Silent(Exception):
    def __str__(self):
        raise ValueError

def fails_to_say(name, arguments):
    raise Silent

def finds_nothing(name, arguments):
    return next(iter(()))

def keys_a_pair(name, arguments):
    return {(1, 2): 3}

def exits(name, arguments):
    raise SystemExit(2)

async def exits_later(name, arguments):
    raise SystemExit(2)
"""


@pytest.fixture
def price_tools(tmp_path, monkeypatch):
    (tmp_path / "price_tools.py").write_text(TOOL_CALLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("price_tools", None)


@pytest.mark.parametrize("specs", ["SPECS", "specs"], ids=["a list", "a function"])
async def test_one_function_runs_the_tools_of_a_list(price_tools, random_engine, chat_tokenizer, specs):
    made = generator(f"tool_calls:call=price_tools.call,specs=price_tools.{specs}")
    [sample] = (await played(made, random_engine(texts=[CALL, "7"]), chat_tokenizer)).samples
    assert '"name": "price"' in sample.prompt.text and sample.response == "7" and not sample.failure
    assert sys.modules["price_tools"].seen == [("price", {"item": "pear"})]
    assert "<|im_start|>tool\n7<|im_end|>" in chat_tokenizer.decode(sample.tokens)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "OSError: closed"),
        ("fails_to_say", "Silent: (its str raises ValueError)"),
        ("finds_nothing", "StopIteration"),
        ("keys_a_pair", "TypeError: keys must be str, int, float, bool or None, not tuple"),
        ("exits", "SystemExit: 2"),
        ("exits_later", "SystemExit: 2"),
    ],
)
async def test_the_model_reads_whatever_a_tool_raises(price_tools, random_engine, chat_tokenizer, name, said):
    """The tools may come from the row."""
    prompt = Prompt("a pear", (1, 2), "7", {}, input="a pear", tools=[{"name": "price"}])
    made = generator(f"tool_calls:call=price_tools:{name}")
    [sample] = (await played(made, random_engine(texts=[CALL, "7"]), chat_tokenizer, prompt)).samples
    assert f"tool\nerror: {said}<|im_end|>" in chat_tokenizer.decode(sample.tokens)


@pytest.mark.parametrize("arguments", ["[1]", "pear", "3", '"pear"'])
async def test_arguments_that_are_no_object_do_not_reach_the_tool(
    price_tools, random_engine, chat_tokenizer, arguments
):
    call = json.dumps({"name": "price", "arguments": arguments})
    made = generator("tool_calls:call=price_tools.call,specs=price_tools.SPECS")
    engine = random_engine(texts=[f"<tool_call>{call}</tool_call>", "7"])
    [sample] = (await played(made, engine, chat_tokenizer)).samples
    assert "error: these are not the arguments of price" in chat_tokenizer.decode(sample.tokens)
    assert sys.modules["price_tools"].seen == []


async def test_a_tool_may_name_an_argument_function():
    assert await content_of_call(lambda function: f"draws {function}", function="x^2") == "draws x^2"


async def test_a_row_without_tools_fails(price_tools, random_engine, chat_tokenizer):
    [sample] = (await played(generator("tool_calls:call=price_tools.call"), random_engine(), chat_tokenizer)).samples
    assert "the row has no tools" in sample.failure


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("tool_calls", "needs the function that runs a call"),
        ("tool_calls:call=price_tools.SPECS", "module price_tools has no function SPECS"),
        ("tool_calls:call=price_tools.call,specs=price_tools.seen", "give a list of tools, as objects"),
    ],
)
def test_wrong_tools_are_refused_at_the_start(price_tools, name, fault):
    with pytest.raises(InputError, match=fault):
        generator(name)


def test_a_function_of_tools_cannot_end_the_process(price_tools):
    with pytest.raises(UserCodeError, match="^--environment tool_calls:specs price_tools.exits_at_specs: raised "):
        generator("tool_calls:call=price_tools.call,specs=price_tools.exits_at_specs")


@pytest.mark.parametrize("name", ["Shop", "Echo"])
async def test_max_turns_bounds_the_answers(random_engine, chat_tokenizer, name):
    engine = random_engine(texts=[CALL] * 20)
    [sample] = (await played(generator(f"{__name__}:{name}", max_turns=2), engine, chat_tokenizer)).samples
    assert len(engine.answers) == 2 and not sample.failure


async def test_max_turns_cannot_bound_a_loop_of_the_environments_own(random_engine, chat_tokenizer):
    [sample] = (await played(generator(f"{__name__}:Silent", max_turns=2), random_engine(), chat_tokenizer)).samples
    assert "has a separate loop (play), which --max-turns cannot bound" in sample.failure


async def _scored(samples):
    return REWARDS["environment"].score(samples, None)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('{"name": "cost", "arguments": {}}', "error: there is no tool cost; there are price"),
        ('{"name": "price", "arguments": {"fruit": "pear"}}', "error: these are not the arguments of price: "),
        ('{"name": "price", "arguments": "pear"}', "error: these are not the arguments of price: "),
        ('{"name": "price", "arguments": {"item": "fig"}}', "error: KeyError: 'fig'"),
    ],
)
async def test_a_wrong_call_is_answered_with_its_fault(random_engine, chat_tokenizer, call, said):
    engine = random_engine(texts=[f"<tool_call>{call}</tool_call>", "8"])
    [sample] = (await played(generator(f"{__name__}:Shop"), engine, chat_tokenizer)).samples
    assert said in chat_tokenizer.decode(sample.tokens)
    assert sample.environment_reward == 0.0


async def test_the_last_turn_runs_no_tool(random_engine, chat_tokenizer):
    engine = random_engine(texts=[CALL] * Shop.max_turns)
    [sample] = (
        await played(generator(f"{__name__}:Shop"), engine, chat_tokenizer, max_new=4000, max_context=5000)
    ).samples
    assert len(engine.answers) == Shop.max_turns
    assert sample.loss_mask[-1] == 1


async def test_a_conversation_that_leaves_no_room_is_truncated_and_scored(random_engine, chat_tokenizer):
    engine = random_engine(texts=["ab"] * 100)
    [sample] = (await played(generator(f"{__name__}:Echo"), engine, chat_tokenizer, max_context=200)).samples
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.environment_reward == len(engine.answers) > 1
    assert len(sample.tokens) <= 200
    assert not sample.failure


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Raises", "raised OSError: no board"),
        ("Cancels", "raised CancelledError"),
        ("Exits", "raised SystemExit: 2"),
        ("ExitsAtOnce", "raised SystemExit: 2"),
        ("Wordless", r"raised Silently: \(its str raises ValueError\)"),
        ("Hangs", r"took more than 0.3 s on its own \(--agent-timeout\)"),
        ("Unscored", r"gave the reward float nan, which is not a finite number \(a float, say\)"),
        ("Silent", "made no call that was answered: it never called the model"),
        ("no_environment", "returned Prompt, which is no Environment"),
    ],
)
async def test_an_environment_that_fails_fails_as_a_reward_does(random_engine, chat_tokenizer, name, fault):
    made = generator(f"{__name__}:{name}", agent_timeout=0.3 if name == "Hangs" else 600.0)
    group = await played(made, random_engine(texts=["ab"] * 9), chat_tokenizer, n_samples=2)
    with pytest.raises(RewardError, match=rf"^--environment {__name__}:{name} {fault}; prompt set.jsonl:7, group 5"):
        await score(group.samples, _scored, None)
    assert await score(group.samples, _scored, -1.0) == 2
    assert [sample.reward for sample in group.samples] == [-1.0, -1.0]


async def test_a_tool_that_never_returns_fails_its_trajectory_and_holds_no_thread_of_asyncio(
    random_engine, chat_tokenizer
):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    try:
        made = generator(f"{__name__}:Blocks", agent_timeout=0.3)
        [sample] = (await played(made, random_engine(texts=[CALL]), chat_tokenizer)).samples
        assert "took more than 0.3 s on its own (--agent-timeout)" in sample.failure
        assert await asyncio.wait_for(asyncio.to_thread(int, "3"), 30) == 3
    finally:
        Blocks.end.set()


async def test_the_wait_for_a_thread_is_not_time_of_the_environment(random_engine, chat_tokenizer, monkeypatch):
    monkeypatch.setattr(user_code, "MAX_THREADS", 1)
    engine = random_engine(texts=["ab"])
    [sample] = (await played(generator(f"{__name__}:Waits"), engine, chat_tokenizer)).samples
    assert (sample.failure, sample.environment_reward) == ("", 1.0)


async def test_a_trajectory_that_is_aborted_is_no_failure(random_engine, chat_tokenizer):
    engine = random_engine(texts=["ab"], finish="abort")
    [sample] = (await played(generator(f"{__name__}:Echo"), engine, chat_tokenizer)).samples
    assert (sample.status, sample.failure, sample.environment_reward) == (SampleStatus.ABORTED, "", None)


async def test_what_the_engine_raises_ends_the_run(chat_tokenizer):
    class Broken:
        async def generate(self, request):
            raise ConnectionError("engine is gone")

    with pytest.raises(ConnectionError, match="engine is gone"):
        await played(generator(f"{__name__}:Echo"), Broken(), chat_tokenizer)


def gym_prompt():
    from miles.tasks.data.reasoning_gym_task import GymTask

    row = GymTask("reasoning_gym:products:size=1,seed=3")[0]
    columns = row.columns
    return Prompt(
        columns["question"], (1, 2), columns["answer"], columns["metadata"], row.where, input=columns["question"]
    )


async def test_a_task_of_reasoning_gym_is_tried_again_until_it_is_right(random_engine, chat_tokenizer):
    prompt = gym_prompt()
    engine = random_engine(texts=["0", prompt.label, "not asked"])
    made = generator("reasoning_gym:attempts=3")
    [sample] = (await played(made, engine, chat_tokenizer, prompt)).samples
    assert len(engine.answers) == 2
    assert "That is not right. Try again." in chat_tokenizer.decode(sample.response_ids)
    assert sample.environment_reward == 1.0


async def test_a_task_of_reasoning_gym_has_the_score_of_its_last_attempt(random_engine, chat_tokenizer):
    engine = random_engine(texts=["0", "1", "not asked"])
    made = generator("reasoning_gym:attempts=2")
    [sample] = (await played(made, engine, chat_tokenizer, gym_prompt())).samples
    assert len(engine.answers) == 2
    assert 0 <= sample.environment_reward < 1


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("reasoning_gyms", "no such environment; did you mean reasoning_gym"),
        ("reasoning_gym:tries=2", "reasoning_gym has no option tries; it has attempts"),
        ("reasoning_gym:attempts=0", "attempts=0 must be a whole number from 1 on"),
        ("reasoning_gym:attempts", "'attempts' is not key=value"),
        ("no_such_module:Class", "cannot import module no_such_module"),
        (f"{__name__}:Nothing", "has no function Nothing"),
    ],
)
def test_an_environment_that_is_not_there_is_named(name, fault):
    with pytest.raises(InputError, match=rf"^--environment {name}: |^--environment reasoning_gym: .*") as raised:
        generator(name)
    assert fault in str(raised.value)


# A task set of the library verifiers with a harness that needs no other program: it calls the model's URL on its own.
TASKSET = """
import httpx
import verifiers.v1 as vf

__all__ = ["Sums", "Talk"]

class SumData(vf.TaskData):
    answer: str

class Sum(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

class Config(vf.TasksetConfig):
    longest: int = 3

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for n in range(self.config.longest):
            yield Sum(SumData(prompt=f"{n} + {n}", answer=str(2 * n)), self.config.task)

class Talk(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient() as client:
            for follow in ("again", None):
                call = {"model": ctx.model, "messages": messages}
                headers = {"Authorization": f"Bearer {secret}"}
                response = await client.post(f"{endpoint}/chat/completions", json=call, headers=headers)
                response.raise_for_status()
                messages += [response.json()["choices"][0]["message"], {"role": "user", "content": follow}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
"""


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """Return the module name of the task set; skip without the library."""
    pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed: pip install verifiers==0.4.0")
    (tmp_path / "tiny_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield "tiny_sums"
    sys.modules.pop("tiny_sums", None)


async def test_an_episode_of_verifiers_is_recorded_and_rewarded(sums, random_engine, chat_tokenizer):
    from miles.tasks.data.sources import open_rows

    rows = list(open_rows(f"verifiers:{sums}:longest=5,size=4").read(0, 4))
    assert [row.columns["prompt"] for row in rows] == ["0 + 0", "1 + 1", "2 + 2", "3 + 3"]
    columns = rows[3].columns
    metadata = json.loads(json.dumps(columns["metadata"]))
    prompt = Prompt("3 + 3", (1, 2), None, metadata, rows[3].where, input=columns["prompt"])
    engine = random_engine(texts=["5", "6"])
    [sample] = (await played(generator("verifiers"), engine, chat_tokenizer, prompt)).samples
    assert not sample.failure
    assert chat_tokenizer.decode(sample.tokens).count("<|im_start|>assistant") == 2
    trained = [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert chat_tokenizer.decode(trained) == "5<|im_end|>6<|im_end|>"
    assert sample.environment_reward == 2.0


async def test_a_prompt_that_is_no_task_of_verifiers_fails(sums, random_engine, chat_tokenizer):
    [sample] = (await played(generator("verifiers"), random_engine(), chat_tokenizer)).samples
    assert "the prompt set.jsonl:7 is no task of verifiers" in sample.failure


def test_a_taskset_that_is_not_there_is_named(sums):
    from miles.tasks.data.sources import open_rows

    with pytest.raises(InputError, match="^prompt source verifiers:no_such_set: verifiers refuses it"):
        open_rows("verifiers:no_such_set")
    with pytest.raises(InputError, match="longer"):
        open_rows(f"verifiers:{sums}:longer=5")
