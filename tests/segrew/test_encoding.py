"""One rule of cutting: what is kept of a prompt and its answer depends on nothing beside them."""

import itertools
import json
import resource
import time

import pytest

from segrew.chat import ChatFormat
from segrew.encoding import cutting, encode_answer, encode_pair, encode_pairs, fit
from segrew.preferences import PreferencePair, load_preferences


@pytest.fixture
def chat(build_byte_tokenizer):
    return ChatFormat.from_tokenizer(build_byte_tokenizer(), "raw")


def pair_of(chosen, rejected, prompt="pppp", **more):
    return PreferencePair([{"role": "user", "content": prompt}], chosen, rejected, **more)


def test_b16_a_cut_answer_gets_no_stop_token_in_place_of_its_last(chat):
    """Within 40 tokens: 4 of the prompt and 36 of the answer."""
    text = "a" * 80
    beyond = encode_pair(pair_of(text, text[:60] + "b" * 20), chat, 40)
    assert beyond.chosen == beyond.rejected
    early = encode_pair(pair_of(text, "b" + text[1:]), chat, 40)
    last = encode_pair(pair_of(text, text[:35] + "b" + text[36:]), chat, 40)
    for pair in (early, last):
        assert [len(p + r) for p, r in zip(pair.prompts, (pair.chosen, pair.rejected), strict=True)] == [40, 40]
        assert pair.ended == (False, False) and 2 not in pair.chosen + pair.rejected
    assert last.chosen[:-1] == last.rejected[:-1] and last.chosen[-1] != last.rejected[-1]


def test_the_prompt_is_cut_on_its_left_first_and_at_most_to_half(chat):
    prompt = "".join(map(chr, range(ord("A"), ord("A") + 30)))
    fits = encode_pair(pair_of("a" * 9, "b" * 5, prompt), chat, 40)
    assert list(map(chat.decode, fits.prompts)) == [prompt] * 2 and fits.ended == (True, True) and not fits.cut
    cut = encode_pair(pair_of("a" * 15, "b" * 5, prompt), chat, 40)
    assert list(map(chat.decode, cut.prompts)) == [prompt[-24:], prompt] and cut.ended == (True, True)
    long = encode_pair(pair_of("a" * 30, "b" * 5, prompt), chat, 40)
    assert chat.decode(long.prompts[0]) == prompt[-20:] and chat.decode(long.chosen) == "a" * 20
    assert long.ended == (False, True) and long.cut == {"prompt", "answer"}


def ids(n, start=0):
    return list(range(start, start + n))


@pytest.mark.parametrize("prompt, response, total, kept", [
    (8, 6, 14, 6), (20, 6, 24, 6), (50, 6, 24, 6), (50, 30, 24, 12), (800, 6, 24, 6),
])  # fmt: skip
def test_b25_a_long_prompt_never_swallows_the_response(prompt, response, total, kept):
    cut = fit(ids(prompt), ids(response, 1000), True, 24)
    assert len(cut.prompt) + len(cut.response) == total and len(cut.response) == kept
    assert cut.prompt == ids(prompt)[prompt - len(cut.prompt) :]  # its end
    assert cut.response == ids(response, 1000)[:kept] and cut.ended == (kept == response)
    assert (fit(ids(prompt), ids(response), True, 24, "drop") is None) == (prompt + response > 24)


def test_b25_a_short_answer_beside_a_long_one_keeps_all_of_itself(chat):
    pair = encode_pair(pair_of("ab", "c" * 39, "p" * 8), chat, 24)
    assert len(pair.chosen) == 3 and pair.prompts[0] == pair.prompts[1] and len(pair.prompts[0]) == 8
    assert len(pair.rejected) == 16 and pair.ended == (True, False) and pair.cut == {"answer"}


@pytest.mark.parametrize("overlong", ["truncate_prompt_left", "truncate_response"])
def test_whatever_is_too_long_fits_and_both_parts_are_left(overlong):
    for limit, prompt, response in itertools.product((8, 9, 24), (1, 4, 5, 12, 40), (1, 4, 5, 12, 40)):
        cut = fit(ids(prompt), ids(response), True, limit, overlong)
        assert min(limit, prompt + response) == len(cut.prompt) + len(cut.response)
        first, other = (cut.prompt, prompt), (cut.response, response)
        if overlong == "truncate_response":
            first, other = other, first
        half = limit // 2
        assert len(first[0]) >= min(first[1], half)
        if other[1] <= limit - half or first[1] + other[1] <= limit:
            assert len(other[0]) == other[1]  # whole while half of the room suffices for what is cut first


def test_the_response_is_cut_first_where_it_is_told_so():
    cut = fit(ids(10), ids(30, 100), True, 24, "truncate_response")
    assert (cut.prompt, cut.response, cut.ended, cut.cut) == (ids(10), ids(14, 100), False, ("answer",))
    cut = fit(ids(15), ids(15, 100), True, 24, "truncate_response")  # down to half, and then the prompt
    assert (cut.prompt, cut.response, cut.cut) == (ids(12, 3), ids(12, 100), ("prompt", "answer"))


def test_one_answer_is_encoded_alike_beside_any_other(chat):
    prompt, answer = "".join(map(chr, range(65, 65 + 30))), "a" * 9
    alone = encode_answer([{"role": "user", "content": prompt}], answer, chat, 32)
    for other in ("b", "b" * 20, "b" * 200):
        pair = encode_pair(pair_of(answer, other, prompt), chat, 32)
        assert (pair.prompts[0], pair.chosen, pair.ended[0]) == (alone.prompt, alone.response, alone.ended)
        swapped = encode_pair(pair_of(other, answer, prompt), chat, 32)
        assert (swapped.prompts[1], swapped.rejected) == (alone.prompt, alone.response)


def test_error_and_drop_say_which_and_how_many(chat):
    short, long = pair_of("a", "b", id="1"), pair_of("a", "b" * 40, id="2", where="x.jsonl, line 2")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: 45 tokens with its prompt, more than --max_length 24"):
        encode_pairs([short, long], chat, 24, "error")
    kept, encoded, counts = encode_pairs([short, long], chat, 24, "drop")
    assert kept == [short] and len(encoded) == 1 and counts == {"pairs left out: longer than --max_length": 1}
    assert (
        cutting("drop") == cutting("error") == "truncate_prompt_left"
        and cutting("truncate_response") == "truncate_response"
    )


def test_token_ids_are_taken_as_they_are_and_end_only_with_a_stop_token(chat):
    row = pair_of("", "", ids=([70, 71], [72, 73, 2], [74, 75]))
    (pair,), (encoded,), _ = encode_pairs([row], chat, 24)
    assert encoded.prompts == ([70, 71], [70, 71])
    assert (encoded.chosen, encoded.rejected, encoded.ended) == ([72, 73, 2], [74, 75], (True, False))
    assert pair.chosen == chat.decode([72, 73]) and pair.rejected == chat.decode([74, 75])
    with pytest.raises(ValueError, match="here: token id 259 is none of the tokenizer's 259"):
        encode_pair(pair_of("", "", ids=([70], [259], [74]), where="here"), chat, 24)


def test_whole_texts_follow_a_bos_or_else_the_end_token(chat):
    pair = encode_pair(PreferencePair([], "ab", "cd"), chat, 24)
    assert pair.prompts == ([1], [1]) and chat.decode(pair.chosen) == "ab"
    chat.tokenizer.bos_token = None
    assert encode_pair(PreferencePair([], "ab", "cd"), chat, 24).prompts == ([2], [2])


def test_b43_one_enormous_line_costs_no_more_than_what_is_used(tmp_path, chat):
    """11 MiB of text, of which 512 tokens are read, at the head of an answer or at the end of a prompt."""
    rows = [{"prompt": "p", "chosen": "ok", "rejected": text} for text in ("no", "a" * 11 * 2**20, "bad")]
    rows += [{"prompt": "x" * 11 * 2**20 + "last", "chosen": "a", "rejected": "b"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    pairs, encoded, counts = encode_pairs(load_preferences(str(path)).pairs, chat, 512)
    assert len(pairs) == 4 and counts == {
        "pairs with answer cut to --max_length": 1,
        "pairs with prompt cut to --max_length": 1,
    }
    assert len(encoded[1].rejected) == 511 and encoded[1].ended == (True, False)
    assert chat.decode(encoded[3].prompts[0]).endswith("xlast") and len(encoded[3].prompts[0]) == 510
    spans = chat.cut_text(encoded[1].rejected, [9, 510], pairs[1].rejected)
    assert spans == [(0, 10), (10, 11 * 2**20)]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 600 * 1024 and time.process_time() - start < 30
