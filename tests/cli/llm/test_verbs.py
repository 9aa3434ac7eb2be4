"""`sparsebit llm`: quantize, eval and generate on a tiny model, and options that do not fit together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsebit.cli.main import app
from sparsebit.report import read_run
from tests.llm.tiny_models import saved, tiny_model, with_bpe, with_tokenizer, write_text

pytest.importorskip("compressed_tensors")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_text(tmp_path / "text.txt")
    return with_tokenizer(saved(tiny_model(), tmp_path / "model"))


def run(*args: object, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["llm", *map(str, args)])
    assert found.exit_code == code, found.output
    return found.stdout if code == 0 else found.output


def test_a_revision_is_of_the_hub(source: Path) -> None:
    words = ("quantize", source, "-o", source.parent / "packed", "--method", "rtn", "--scale-search", "none")
    assert "only models of the hub have revisions" in run(*words, "--revision", "main", code=1)


def test_from_a_folder_to_text(source: Path) -> None:
    text, packed = source.parent / "text.txt", source.parent / "packed"
    common = ("--text", text, "--length", 24, "--num-samples", 6, "--group-size", 32, "--json", "-q")
    made = json.loads(run("quantize", source, "-o", packed, "--bits", 4, "--sweeps", 1, *common))
    assert made["check"]["difference"] <= 1e-3 and len(made["layers"]) == 21
    assert made["packed_bytes"] < made["float_bytes"]
    floats, found = (
        json.loads(run("eval", folder, "--text", text, "--length", 24, "--num-windows", 8, "--json", "-q"))
        for folder in (source, packed)
    )
    assert found["predictions"] == 8 * 23
    assert found["perplexity"] == pytest.approx(floats["perplexity"], rel=0.3)
    assert found["resident_bytes"] < floats["resident_bytes"]
    spoken = json.loads(run("generate", packed, "-p", "abc", "--max-new-tokens", 5, "--json", "-q"))
    streamed = run("generate", packed, "-p", "abc", "--max-new-tokens", 5, "-q")
    assert streamed.strip() == spoken["text"].strip()
    assert run("generate", packed, "-p", "abc", "--chat", "--temperature", 0.7, "--max-new-tokens", 2, "-q")


def test_several_kinds_of_text(source: Path) -> None:
    texts = [source.parent / name for name in ("text.txt", "other.txt")]
    texts[1].write_text(texts[0].read_text()[::-1])
    common = ("quantize", source, "--method", "rtn", "--no-check", "--num-samples", 7, "--length", 24)
    given = [word for text in texts for word in ("--text", text)]
    shown = run(*common, *given, "-o", source.parent / "packed", "--group-size", 32)
    assert "7 windows, 2 kinds of text: 4 of" in " ".join(shown.split())
    made = json.loads(run(*common, *given[:2], "-o", source.parent / "one", "--group-size", 32, "--json", "-q"))
    assert made["calibration_windows"] == {str(texts[0]): 7}


def test_the_table(source: Path) -> None:
    output = source.parent / "packed"
    shown = run(
        "quantize", source, "-o", output, "--method", "rtn", "--scale-search", "none", "--bits", 3, "--group-size", 0
    )
    assert "21 linear layers" in shown and "loads it" in shown and "would refuse: 3 bits" in shown


def test_training_end_to_end(source: Path) -> None:
    common = ("quantize", source, "--method", "rtn", "--scale-search", "none", "--bits", 2, "--group-size", 32)
    text = ("--text", source.parent / "text.txt", "--num-samples", 7, "--length", 24, "--no-check", "--end-to-end", 4)
    shown = " ".join(run(*common, "-o", source.parent / "packed", *text).split())
    assert "divergence from the float model" in shown and "of 4 steps" in shown
    record = json.loads(run(*common, "-o", source.parent / "other", *text, "--json"))["end_to_end"]
    assert record["kept_step"] in (1, 2, 3, 4) and record["after"] < record["before"]


def test_the_perplexity_of_both_models(source: Path) -> None:
    text, packed = source.parent / "text.txt", source.parent / "packed"
    common = ("quantize", source, "-o", packed, "--method", "rtn", "--scale-search", "none", "--group-size", 32)
    measured = ("--heldout", text, "--num-windows", 3, "--length", 24)
    assert "3 are wanted" in run(*common, "--heldout", text, "--num-windows", 3, "--length", 3000, code=1)
    assert "only together with --heldout" in run(*common, "--num-windows", 3, code=2)
    assert not packed.exists()
    found = json.loads(run(*common, *measured, "--no-check", "--json"))["perplexity"]
    assert (found["windows"], found["length"]) == (3, 24)
    for name, folder in (("float", source), ("packed", packed)):
        told = json.loads(run("eval", folder, "--text", text, "--num-windows", 3, "--length", 24, "--json"))
        assert found[name] == pytest.approx(told["perplexity"], rel=1e-5)
    assert found["float"] != found["packed"]
    card = read_run(packed).cards[0]
    assert (card.label, card.value, card.before) == ("Perplexity", f"{found['packed']:.2f}", f"{found['float']:.2f}")
    shutil.rmtree(packed)
    line = next(line for line in run(*common, *measured, "--no-check").splitlines() if line.startswith("perplexity"))
    assert f"{found['float']:.2f} float, {found['packed']:.2f} packed" in line


def test_more_tokens_than_a_model_has_positions_for(tmp_path: Path) -> None:
    source = with_tokenizer(saved(tiny_model("opt", num_hidden_layers=1), tmp_path / "opt"))
    assert run("generate", source, "-p", "abc", "--max-new-tokens", 126, "-q")
    told = " ".join(run("generate", source, "-p", "abc", "--max-new-tokens", 127, code=1).split())
    assert "129 tokens in a row, and the model has 128 positions" in told and "--max-new-tokens" in told


def test_a_chat_template_that_refuses_the_prompt(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ raise_exception('a system message is needed') }}")
    told = " ".join(run("generate", source, "-p", "abc", "--chat", code=1).split())
    assert "refuses the messages (a system message is needed)" in told


def test_experts_and_inputs_that_are_not_scaled_are_shown(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": 1, "num_local_experts": 2}
    source = with_tokenizer(saved(tiny_model("mixtral", **sizes), tmp_path / "model"))
    common = ("--text", tmp_path / "text.txt", "--length", 4, "--num-samples", 1, "--group-size", 32, "--no-check")
    shown = " ".join(run("quantize", source, "-o", tmp_path / "a", "--method", "awq", "--symmetric", *common).split())
    assert "scaled inputs" in shown and "experts share their input" in shown
    assert "6 of 6 layers got too few tokens" in shown and "layer of an expert" in shown
    told = run("quantize", source, "-o", tmp_path / "b", *common, code=1)
    assert "--symmetric" in told


def test_convert(source: Path) -> None:
    packed, other = source.parent / "packed", source.parent / "gptq"
    run(
        *("quantize", source, "-o", packed, "--method", "rtn", "--scale-search", "none", "--group-size", 32),
        *("--symmetric", "--no-check", "-q"),
    )
    shown = run("convert", packed, "-o", other, "--to", "gptq")
    assert "21 packed layers as gptq" in shown and "logits differ by 0" in shown
    assert "allowed: compressed-tensors" in run("convert", packed, "-o", source.parent / "x", "--to", "exl2", code=1)


def test_mixed_bits(source: Path) -> None:
    shown = run(
        *("quantize", source, "-o", source.parent / "packed", "--method", "rtn", "--group-size", 32, "--no-check"),
        *("--text", source.parent / "text.txt", "--length", 24, "--num-samples", 6),
        *("--candidate-bits", 2, 4, "--average-bits", 3),
    )
    assert "q_proj" in shown and "in the mean" in shown


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--bits", 5), 1, "allowed: 2, 3, 4, 8"),
        (("--method", "rtn", "--no-refit"), 1, "options of gptq"),
        (("--method", "rtn", "--scale-search", "none", "--seed", 3), 2, "nothing is drawn"),
        ((), 1, "needs calibration text"),
        (("--candidate-bits", "2,4"), 1, "give an average from 2 to 4"),
    ],
    ids=["bits", "rtn", "no-text", "gptq-no-text", "no-average"],
)
def test_options_that_do_not_fit(source: Path, args: tuple[object, ...], code: int, message: str) -> None:
    shown = run("quantize", source, "-o", source.parent / "packed", *args, code=code)
    assert message in " ".join(shown.split())
    assert not (source.parent / "packed").exists()


def test_for_llama_cpp(source: Path) -> None:
    pytest.importorskip("gguf")
    with_bpe(saved(tiny_model(vocab_size=264, bos_token_id=257, eos_token_id=258), source.parent / "bpe"))
    floats, text = source.parent / "bpe", source.parent / "text.txt"
    common = ("--method", "rtn", "--scale-search", "none", "--no-check")
    refused = run("quantize", floats, "-o", source.parent / "q4", *common, "--for", "llama.cpp", "--bits", 3, code=1)
    assert "3 bits for llama.cpp" in refused and "ask for 4 or 8" in " ".join(refused.split())
    for name, more in (("q4", ("--for", "llama.cpp")), ("w4", ("--group-size", 32))):
        shown = run("quantize", floats, "-o", source.parent / name, *common, *more)
        assert ("--to gguf" in shown) == (name == "q4")
        file = source.parent / f"{name}.gguf"
        made = json.loads(run("convert", source.parent / name, "-o", file, "--to", "gguf", "--no-check", "--json"))
        assert set(made["gguf_types"].values()) - {"F32", "BF16", "F16"} == {"Q4_0" if name == "q4" else "Q5_0"}
        assert ["are stored as Q5_0, 5.5 bits" in warning for warning in made["warnings"]] == [True] * (name == "w4")
    assert "give one" in run("eval", file, code=2) and "--device" in run("eval", file, "--device", "cuda", code=2)
    pytest.importorskip("xllamacpp")
    measured = json.loads(run("eval", file, "--text", text, "--length", 24, "--num-windows", 4, "--json", "-q"))
    folder = source.parent / "w4"
    wanted = json.loads(run("eval", folder, "--text", text, "--length", 24, "--num-windows", 4, "--json", "-q"))
    assert measured["perplexity"] == pytest.approx(wanted["perplexity"], rel=0.02)
    assert measured["file_bytes"] == file.stat().st_size


def test_finetune_and_merge(source: Path) -> None:
    pytest.importorskip("peft")
    packed, adapter, merged = (source.parent / name for name in ("packed", "adapter", "merged"))
    text, data = source.parent / "text.txt", source.parent / "data.jsonl"
    run(
        *("quantize", source, "-o", packed, "--method", "rtn", "--scale-search", "none", "--group-size", 32),
        *("--no-check", "-q"),
    )
    data.write_text('{"prompt": "say a", "response": "aaa"}\n{"prompt": "say b", "response": "bbb"}\n')
    common = ("finetune", packed, data, "-o", adapter, "--length", 24, "--epochs", 2, "--rank", 2)
    made = json.loads(run(*common, "--targets", "q_proj, v_proj", "--json", "-q"))
    assert made["num_samples"] == 2 and len(made["losses"]) == 2 and made["tuning"]["targets"] == ["q_proj", "v_proj"]
    assert "exists" in run(*common, code=1)
    found = json.loads(
        run("eval", packed, "--adapter", adapter, "--text", text, "--length", 24, "--num-windows", 4, "--json", "-q")
    )
    assert found["adapter"] == str(adapter)
    common = ("merge", adapter, "-o", merged, "--text", text, "--length", 24, "--num-windows", 4)
    assert "of what the adapter changes" in run(*common, code=1) and not merged.exists()
    shown = run(*common, "--max-loss", 9)
    assert "effect of the adapter lost" in shown
    assert "6 layers took up the adapter" in shown and "perplexity" in shown
    spoken = json.loads(
        run("generate", packed, "--adapter", adapter, "-p", "say a", "--max-new-tokens", 3, "--json", "-q")
    )
    assert spoken["tokens"] >= 1
    data.write_text('{"prompt": "say a"}\n')
    assert "data.jsonl:1: it has no response" in " ".join(
        run("finetune", packed, data, "-o", source.parent / "x", code=1).split()
    )


def test_single_device(source: Path) -> None:
    common = ("eval", source, "--text", source.parent / "text.txt", "--length", 24, "--num-windows", 4, "--json", "-q")
    whole, streamed = json.loads(run(*common)), json.loads(run(*common, "--single-device"))
    assert streamed["perplexity"] == whole["perplexity"]
    assert streamed["resident_bytes"] < whole["resident_bytes"]
    spoken = CliRunner().invoke(
        app, ["llm", "generate", str(source), "-p", "abc", "--max-new-tokens", "2", "--single-device"]
    )
    assert "blocks were streamed" in spoken.stderr
    asked = ("generate", source, "-p", "abc", "--max-new-tokens", 3, "--json", "-q")
    assert json.loads(run(*asked, "--single-device"))["text"] == json.loads(run(*asked))["text"]
    assert "not together with --activations" in run(*asked, "--single-device", "--activations", "int8", code=2)


def test_prompts_and_devices_that_do_not_work(source: Path) -> None:
    assert "has no tokens" in run("generate", source, "-p", "", code=1)
    both = ("--compile", "--single-device")
    assert "leave --compile or --single-device out" in run("generate", source, "-p", "abc", *both, code=1)
    assert "allowed: cpu, cuda" in run("generate", source, "-p", "abc", "--device", "nonsense", code=1)
    assert "is not a folder" in run("generate", source / "nothing", "-p", "abc", code=1)


def test_a_beam_search_in_the_settings_of_a_model_is_not_made(source: Path) -> None:
    expected = run("generate", source, "-p", "abc", "--max-new-tokens", 4, "-q")
    (source / "generation_config.json").write_text(json.dumps({"num_beams": 3, "eos_token_id": 2}))
    assert run("generate", source, "-p", "abc", "--max-new-tokens", 4, "-q") == expected


def test_a_packed_cache(source: Path) -> None:
    text, packed = source.parent / "text.txt", source.parent / "packed"
    common = ("--method", "rtn", "--group-size", 32, "--scale-search", "none", "--length", 24, "--text", text)
    shown = run("quantize", source, "-o", packed, *common, "--num-samples", 6, "--kv-cache", "int8")
    assert "keys and values in int8" in shown
    measured = ("eval", packed, "--text", text, "--length", 24, "--num-windows", 8, "--json", "-q")
    found = {kind: json.loads(run(*measured, "--kv-cache", kind)) for kind in ("folder", "float", "int4")}
    assert {kind: one["kv_cache"] for kind, one in found.items()} == {
        "folder": "int8",
        "float": "float",
        "int4": "int4",
    }
    assert len({one["perplexity"] for one in found.values()}) == 3
    assert found["folder"]["perplexity"] == pytest.approx(found["float"]["perplexity"], rel=0.01)
    spoken = ("generate", packed, "-p", "abc", "--max-new-tokens", 3, "--json", "-q")
    assert json.loads(run(*spoken, "--kv-cache", "int4"))["kv_cache"] == "int4"
    assert "allowed: folder, float" in run(*spoken, "--kv-cache", "int3", code=1)
