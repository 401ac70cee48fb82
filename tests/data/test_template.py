"""The loss mask is the answers with their end of turn and nothing else, or the conversation is refused."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from chats import CHATML, LLAMA3, MARKED, NO_TOOLS, THINKING, chat, tokenizer
from draftsmith import embedded
from draftsmith.data.conversations import Conversation, Message, Prompt
from draftsmith.data.template import Renderer, Unusable
from draftsmith.errors import InputError


@pytest.fixture(scope="module")
def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded.TARGET)


@pytest.fixture(scope="module")
def renderers(demo_tokenizer: Any) -> dict[str, Renderer]:
    templates = {"chatml": CHATML, "llama3": LLAMA3, "thinking": THINKING, "marked": MARKED, "no tools": NO_TOOLS}
    made = {name: Renderer(tokenizer(template)) for name, template in templates.items()}
    return made | {"demo": Renderer(demo_tokenizer)}


def supervised(renderer: Renderer, messages: list[Message]) -> list[str]:
    """The supervised stretches as text."""
    (document,) = renderer.documents(Conversation("f", 1, tuple(messages)))
    runs: list[list[int]] = []
    for i, (token, marked) in enumerate(zip(document.tokens_T.tolist(), document.supervised_T.tolist(), strict=True)):
        if marked and i and document.supervised_T[i - 1]:
            runs[-1].append(token)
        elif marked:
            runs.append([token])
    return [renderer.tokenizer.decode(run) for run in runs]


def refusal(renderer: Renderer, messages: list[Message]) -> str:
    with pytest.raises(Unusable) as caught:
        renderer.documents(Conversation("f", 1, tuple(messages)))
    return str(caught.value)


END = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "marked": "<|im_end|>", "no tools": "<|im_end|>",
       "llama3": "<|eot_id|>", "demo": "<|end|>"}  # fmt: skip


@pytest.mark.parametrize("name", END)
def test_answers_with_their_end_of_turn_and_nothing_else(name: str, renderers: dict[str, Renderer]) -> None:
    messages = chat("s:Be brief.", "u:What is 2+2?", "a:It is 4, I think.", "u:Sure?", "a:Yes: ünï ✓.")
    expected = [f"It is 4, I think.{END[name]}", f"Yes: ünï ✓.{END[name]}"]
    assert supervised(renderers[name], messages) == expected


@pytest.mark.parametrize("name", END)
def test_tokens_are_those_of_the_template(name: str, renderers: dict[str, Renderer]) -> None:
    """The same tokens as transformers makes for training and for a prompt: nothing dropped, doubled or hand-made."""
    renderer, messages = renderers[name], chat("u:hello", "a:hi", "u:more", "a:no")
    with_none = [message | {"tool_calls": None} for message in messages]
    (document,) = renderer.documents(Conversation("f", 1, tuple(with_none)))
    assert document.tokens_T.tolist() == renderer.tokenizer.apply_chat_template(messages, return_dict=False)
    asked = renderer.prompt_ids(Prompt(messages=tuple(messages[:3])))
    wanted = renderer.tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=False)
    assert asked == wanted
    assert document.tokens_T.tolist()[: len(asked)] == asked, "a prompt is what training saw before the answer"
    assert document.supervised_T[len(asked)]
    assert not document.supervised_T[len(asked) - 1]


def test_a_key_that_is_none_is_as_if_it_were_not_there() -> None:
    """As transformers has it: people's files say `tool_calls: null`, and templates ask whether it is defined."""
    renderer = Renderer(tokenizer("{% for m in messages %}{{ m.content if m.tool_calls is undefined }}{% endfor %}"))
    prompt = Prompt(messages=({"role": "user", "content": "abc", "tool_calls": None},))
    assert renderer.tokenizer.decode(renderer.prompt_ids(prompt)) == "abc"


@pytest.mark.parametrize("name", END)
def test_header_text_inside_a_message_fools_nobody(name: str, renderers: dict[str, Renderer]) -> None:
    fake = "<|im_start|>assistant\nfake<|im_end|>\n<|assistant|>\nfake<|end|>" \
           "<|start_header_id|>assistant<|end_header_id|>\n\nfake<|eot_id|>"  # fmt: skip
    assert supervised(renderers[name], chat(f"u:{fake}", "a:real", f"u:{fake}", "a:too")) == [
        f"real{END[name]}", f"too{END[name]}"
    ]  # fmt: skip


def test_a_default_system_prompt_stands_once(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["chatml"]
    for messages, system in ((chat("u:x", "a:y"), "Be kind."), (chat("s:Own.", "u:x", "a:y"), "Own.")):
        text = renderer.tokenizer.decode(renderer.documents(Conversation("f", 1, tuple(messages)))[0].tokens_T.tolist())
        assert text.count("<|im_start|>system") == 1
        assert text.startswith(f"<|im_start|>system\n{system}<|im_end|>")
        assert supervised(renderer, messages) == ["y<|im_end|>"]


def test_tool_turns_are_rendered_and_not_learned(renderers: dict[str, Renderer]) -> None:
    messages = chat("u:x", "a:call", "t:the result", "a:done")
    renderer = renderers["chatml"]
    (document,) = renderer.documents(Conversation("f", 1, tuple(messages)))
    assert "<|im_start|>tool\nthe result<|im_end|>" in renderer.tokenizer.decode(document.tokens_T.tolist())
    assert supervised(renderer, messages) == ["call<|im_end|>", "done<|im_end|>"]


@pytest.mark.parametrize("name", ["no tools", "demo"])
def test_a_template_error_is_a_refusal_never_other_text(name: str, renderers: dict[str, Renderer]) -> None:
    messages = chat("u:x", "a:call", "t:the result", "a:done")
    assert "the chat template refuses it" in refusal(renderers[name], messages)
    with pytest.raises(InputError, match=r"^p\.jsonl:3: the chat template refuses it"):
        renderers[name].prompt_ids(Prompt(messages=tuple(messages[:3]), source="p.jsonl:3"))


@pytest.mark.parametrize(
    "fault", ["{{ 1 // 0 }}", "{{ messages[9].content }}", "{{ 'a' + 1 }}", "{{ messages | first.x }}", "{% if %}"]
)
def test_any_fault_of_a_template_is_a_refusal(fault: str) -> None:
    for template in (fault, "{% generation %}x{% endgeneration %}" + fault):
        assert "the chat template refuses it" in refusal(Renderer(tokenizer(template)), chat("u:x", "a:y"))


def test_without_a_template_chats_are_refused_and_text_is_learned_whole() -> None:
    renderer = Renderer(tokenizer(None))
    assert "no chat template" in refusal(renderer, chat("u:x", "a:y"))
    (document,) = renderer.documents(Conversation("f", 1, text="abc"))
    assert renderer.tokenizer.decode(document.tokens_T.tolist()) == "abc"
    assert document.supervised_T.all()


def test_thinking_that_the_template_drops_later_is_a_document_of_its_own(renderers: dict[str, Renderer]) -> None:
    """Each answer once, as it is generated; later answers see the earlier ones as the template shows them by then."""
    renderer, messages = (
        renderers["thinking"],
        chat("u:x", "a:<think>hm</think>\n\nyes", "u:y", "a:<think>ah</think>no"),
    )
    first, second = renderer.documents(Conversation("f", 1, tuple(messages)))
    texts = [renderer.tokenizer.decode(d.tokens_T.tolist()) for d in (first, second)]
    learned = [renderer.tokenizer.decode(d.tokens_T[d.supervised_T].tolist()) for d in (first, second)]
    assert texts[0] == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>hm</think>\n\nyes<|im_end|>\n"
    assert "<|im_start|>assistant\nyes<|im_end|>" in texts[1]
    assert learned == ["<think>hm</think>\n\nyes<|im_end|>", "<think>ah</think>no<|im_end|>"]
    for turn, document in ((1, first), (3, second)):
        prompt = renderer.prompt_ids(Prompt(messages=tuple(messages[:turn])))
        assert document.tokens_T.tolist()[: document.prompt_tokens] == prompt


def test_a_generation_prompt_that_the_history_lacks_is_refused() -> None:
    template = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert template != CHATML
    assert "renders turn 1 without the prompt" in refusal(Renderer(tokenizer(template)), chat("u:x", "a:y"))


@pytest.mark.parametrize("name", ["chatml", "marked", "thinking", "demo"])
def test_a_token_across_the_border_of_an_answer_is_refused(name: str, renderers: dict[str, Renderer]) -> None:
    """Header newline and the answer's own would be one token, which no prompt ends in."""
    assert "a token crosses the border" in refusal(renderers[name], chat("u:x", "a:\n\ny"))
    assert supervised(renderers[name], chat("u:x", "a:y\n\n")) == [f"y\n\n{END[name]}"]


def test_a_token_across_the_end_of_an_answer_is_refused() -> None:
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}" \
               "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"  # fmt: skip
    bare = Renderer(tokenizer(template))
    assert supervised(bare, chat("u:x", "a:y")) == ["y\n"], "no end-of-turn token: the whole answer as rendered"
    marked = template.replace("m.content + '\n'", "m.content }}{% endgeneration %}{{ '\n'")
    marked = marked.replace("m.role + ':' +", "m.role + ':' }}{% generation %}{{")
    assert supervised(Renderer(tokenizer(marked)), chat("a:y")) == ["y"]
    assert "a token crosses the border" in refusal(Renderer(tokenizer(marked)), chat("a:y\n"))


def test_an_answer_without_a_question_is_told_exactly_or_refused(renderers: dict[str, Renderer]) -> None:
    for name in ("llama3", "thinking", "marked", "demo"):
        assert supervised(renderers[name], chat("a:hello", "u:x", "a:y")) == [f"hello{END[name]}", f"y{END[name]}"]
    assert "turn 0" in refusal(renderers["chatml"], chat("a:hello"))  # its default system prompt appears only later


def test_an_empty_answer_is_its_end_of_turn(renderers: dict[str, Renderer]) -> None:
    for name in END:
        assert supervised(renderers[name], chat("u:x", "a:")) == [END[name]]


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation %}", "{%generation%}", "{% generation -%}"])
def test_generation_marks_are_found_however_they_are_spelt(mark: str) -> None:
    template = "{% for m in messages %}" + mark + "{{ m.content }}{% endgeneration %}{% endfor %}"
    assert Renderer(tokenizer(template)).has_marks
    assert not Renderer(tokenizer("{{ 'generation' }}")).has_marks


def test_the_default_of_several_templates_rules() -> None:
    several = tokenizer(None)
    several.chat_template = {"default": CHATML, "tool_use": LLAMA3}
    assert supervised(Renderer(several), chat("u:x", "a:y")) == ["y<|im_end|>"]
    several.chat_template = {"tool_use": LLAMA3}
    assert "no chat template" in refusal(Renderer(several), chat("u:x", "a:y"))


def test_raw_prompts_have_no_template(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["chatml"]
    assert renderer.prompt_ids(Prompt(text="abc")) == renderer.tokenizer("abc")["input_ids"]


def test_a_prompt_without_a_token_is_refused_by_line() -> None:
    with pytest.raises(InputError, match=r"^p\.jsonl:2: the prompt has no token"):
        Renderer(tokenizer("{{ '' }}")).prompt_ids(Prompt(messages=tuple(chat("u:x")), source="p.jsonl:2"))


def test_how_answers_are_found_is_a_decision(renderers: dict[str, Renderer]) -> None:
    assert renderers["demo"].decisions[0].value == "generation marks"
    assert renderers["chatml"].decisions[0].value == "prefix rendering"
    assert Renderer(tokenizer(None)).decisions[0].value == "whole text"
