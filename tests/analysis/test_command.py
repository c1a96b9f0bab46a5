"""The command line, as a user runs it: in a process of its own, or, where that would take long,
part by part in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from memsaving_gradients.cli import arguments, explaining, models, starting, target
from tests.helpers.fresh import FreshProcessError, fresh
from tests.reports.test_page import Page

ROOT = Path(__file__).parents[2]

NETS = """
print("said while it is imported")
import keras
import tensorflow as tf

def net(units=10, layers=6, **last):
    tanh = [keras.layers.Dense(64, "tanh", name=f"tanh_{k}") for k in range(layers)]
    return keras.Sequential([keras.Input([64]), *tanh, keras.layers.Dense(units, **last)])

def classes():
    return net(activation="softmax")

def compiled():
    model = classes()
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model

def make_step(layers=8):
    weights = [tf.Variable(tf.eye(64)) for _ in range(layers)]
    def step(x):
        y = x
        for weight in weights:
            y = tf.tanh(y @ weight)
        return [tf.reduce_sum(grad) for grad in tf.gradients(y, weights)]
    return step, (tf.TensorSpec([None, 64]),)

def small_step():
    step, _ = make_step(3)
    return step, (tf.TensorSpec([None, 64]),)

def least_step():
    step, _ = make_step(2)
    return step, (tf.TensorSpec([None, 64]),)

def untraceable():
    return lambda x: 1 / 0, (tf.TensorSpec([4]),)

def no_gradients():
    return lambda x: x + 1, (tf.TensorSpec([4]),)

def frozen():
    model = classes()
    model.trainable = False
    return model

def nothing():
    pass

def fails():
    raise RuntimeError("no\\n  way")

def exits():
    raise SystemExit(3)

def takes(batch):
    pass

class Own(keras.Model):
    def call(self, x):
        return x

def positions():
    x = keras.Input([None], dtype="int32", name="tokens")
    y = keras.layers.Embedding(10, 8)(x)
    return keras.Model(x, keras.layers.Dense(10, "softmax")(y))

def fixed():
    x = keras.Input([8], batch_size=4)
    return keras.Model(x, keras.layers.Dense(1)(x))

def whole_numbers():
    x = keras.Input([8])
    return keras.Model(x, keras.ops.cast(keras.layers.Dense(1)(x), "int32"))

a_model = net()
a_number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    """Yield the working folder, which holds a user's modules."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # The command would drop this process's own log, which pytest captures.
    monkeypatch.setattr(explaining, "be_quiet", lambda: None)
    yield tmp_path
    for name in ("nets", "broken"):
        sys.modules.pop(name, None)


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, without the tests' environment variables for
    TensorFlow."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    env["PYTHONPATH"] = str(ROOT)
    run = [sys.executable, "-m", "memsaving_gradients", *words]
    return subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def forked(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a forked process, which need not import TensorFlow."""
    out, err = folder / "out", folder / "err"
    given = {"words": words, "folder": str(folder), "out": str(out), "err": str(err)}
    try:
        status = fresh("tests.analysis.test_command:begun", given)
    except FreshProcessError as error:
        status = int(str(error).rpartition("ended early, with exit code ")[2])
    return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())


def begun(words: list[str], folder: str, out: str, err: str) -> int:
    """Run the command as Python starts it, with its output in files."""
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["-m", *words]
    sys.orig_argv = [sys.executable, "-m", "memsaving_gradients", *words]
    starting.if_command()
    status = explaining.main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    return status


# --- in a process of its own, or forked


@pytest.mark.parametrize("how", [pytest.param(command, marks=pytest.mark.slow), forked])
def test_a_model_is_explained_planned_for_and_shown(folder: Path, how: Any) -> None:
    words = (
        "nets:classes",
        "--budget",
        "0.7",
        "--optimizer",
        "sgd",
        "--batch",
        "512",
        "--html",
        "page.html",
    )
    done = how("explain", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "nets:classes; assumed: loss sparse_categorical_crossentropy (--loss)"
    for word in ("activations", "least budget: ", "plan 'budget': ", "0.7 of plain): "):
        assert word in done.stdout
    # TensorFlow's log is silent. The module's own output is no result: it goes to standard error.
    assert done.stderr.splitlines() == ["said while it is imported"]
    page = Page((folder / "page.html").read_text(encoding="utf-8"))
    assert len(page.tables) == 3 and "nets:classes" in page.texts


def test_json_is_all_there_is_on_standard_output(folder: Path) -> None:
    done = forked(
        "explain", "nets:make_step", "--json", "--budget", "60KiB", "--batch", "32", folder=folder
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (plan,) = found["plans"]
    assert plan["allocated"] <= plan["budget"] == 60 << 10
    assert {decision["fate"] for decision in plan["decisions"]} == {"keep", "recompute"}
    # The largest values are gradients of weights, and activations.
    assert {64 * 64 * 4, 32 * 64 * 4} >= {one["bytes"] for one in plan["at_peak"][:4]}
    explanation = found["explanation"]
    assert explanation["parts"]["parameters"] == 8 * 64 * 64 * 4
    assert explanation["curve"][-1] == explanation["least"]
    assert found["error"] is None and found["target"] == "nets:make_step"


def test_help_and_wrong_usage_wait_for_no_tensorflow(folder: Path) -> None:
    # Python finds this module before the installed one.
    (folder / "tensorflow.py").write_text("raise RuntimeError('imported')")
    done = command("explain", "--help", folder=folder)
    assert done.returncode == 0 and "examples:" in done.stdout and "--budget" in done.stdout
    wrong = command("explain", folder=folder)
    assert wrong.returncode == 2 and not wrong.stdout
    assert wrong.stderr.splitlines() == [
        "python -m memsaving_gradients: error: the following arguments are required: TARGET; see "
        "python -m memsaving_gradients explain --help"
    ]


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("how", [pytest.param(command, marks=pytest.mark.slow), forked])
def test_ctrl_c_ends_it_quietly(folder: Path, how: Any) -> None:
    (folder / "slow.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)\n"
    )
    done = how("explain", "slow:net", folder=folder)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("how", [pytest.param(command, marks=pytest.mark.slow), forked])
def test_an_error_is_one_line_and_debug_shows_more(folder: Path, how: Any) -> None:
    short = how("explain", "nets:fails", folder=folder)
    said = (
        "python -m memsaving_gradients: error: TARGET='nets:fails': fails when it is called:"
        " RuntimeError: no way"
    )
    assert short.returncode == 2 and not short.stdout
    assert short.stderr.splitlines()[1:] == [said]
    long = forked("explain", "nets:fails", "--debug", folder=folder)
    assert long.returncode == 2
    assert "Traceback" in long.stderr and long.stderr.splitlines()[-1] == said


# --- in this process


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    """Return the exit status, standard output, and our line on standard error."""
    capsys.readouterr()
    status = explaining.main(["explain", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    ours = [line for line in err.splitlines() if line.startswith(arguments.PROGRAM)]
    assert len(ours) <= 1
    return status, out, "".join(ours)


def test_a_budget_that_cannot_be_met_says_the_least(folder: Path, capsys: Any) -> None:
    status, out, said = run(capsys, "nets:least_step", "--batch", "32", "--budget", "100")
    assert status == explaining.NOT_MET
    assert "the budget cannot be met" in said and "the least budget that works is" in said
    assert "least budget:" in out and "plan 'budget'" not in out
    status, out, said = run(capsys, "nets:least_step", "--batch", "32", "--budget", "100", "--json")
    found = json.loads(out)
    assert status == explaining.NOT_MET
    assert found["plans"] == [] and "cannot be met" in found["error"]
    assert f"{found['least_budget']:,} bytes" in said


def test_an_ample_budget_is_noted(folder: Path, capsys: Any) -> None:
    status, out, said = run(capsys, "nets:small_step", "--batch", "32", "--budget", "1GiB")
    assert status == 0
    assert "nothing is recomputed" in out and "note: plain training needs" in said


def test_under_xla_budgets_are_in_the_bytes_that_it_assigns(folder: Path, capsys: Any) -> None:
    words = ("nets:make_step", "--xla", "--budget", "0.7", "--batch", "512", "--json")
    code, out, _ = run(capsys, *words)
    found = json.loads(out)
    plain, (plan,) = found["explanation"]["compiled"][0], found["plans"]
    assert code == 0
    assert found["explanation"]["allocated_plain"] == plain["assigned"] == plan["allocated_plain"]
    assert plan["allocated"] <= plan["budget"] == int(0.7 * plain["assigned"])


def test_the_figure_is_of_the_plan_where_there_is_one(folder: Path, capsys: Any) -> None:
    words = ("nets:small_step", "--batch", "32", "--plot", "figure.svg")
    assert run(capsys, *words)[0] == 0
    alone = (folder / "figure.svg").read_bytes()
    assert run(capsys, *words, "--budget", "1GiB")[0] == 0
    assert (folder / "figure.svg").read_bytes() != alone


def test_a_saved_model_keeps_how_it_was_compiled(folder: Path, capsys: Any) -> None:
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.save("saved.keras")
    status, out, _ = run(capsys, "saved.keras", "--batch", "4", "--json")
    found = json.loads(out)
    assert status == 0 and found["assumed"] == []
    # Only a counter and a learning rate: plain SGD has no slots.
    assert found["explanation"]["parts"]["slots"] < 64


def test_a_saved_model_of_classes_of_its_own_says_how_they_are_known(
    folder: Path, capsys: Any
) -> None:
    (folder / "own.py").write_text(
        "import keras\n"
        "@keras.saving.register_keras_serializable(package='own')\n"
        "class Twice(keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        return 2 * x\n"
    )

    class Twice(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return 2 * x

    with keras.saving.custom_object_scope({}):
        keras.saving.register_keras_serializable(package="own")(Twice)
        model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4), Twice()])
        model.save("saved.keras")
    keras.saving.get_custom_objects().pop("own>Twice")
    status, _, said = run(capsys, "saved.keras")
    assert status == 2
    assert "TARGET='saved.keras': needs 'Twice'" in said and "--import module" in said
    assert run(capsys, "saved.keras", "--import", "own", "--batch", "4")[0] == 0
    keras.saving.get_custom_objects().pop("own>Twice")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("gone.keras", "TARGET='gone.keras': there is no such file"),
        ("nets.py", "TARGET='nets.py': "),
        ("damaged.keras", "TARGET='damaged.keras': is damaged, or was not written"),
        (".", "TARGET='.': is a folder"),
        ("nets", "is neither a file nor package.module:name"),
        ("nets:", "is neither a file nor package.module:name"),
        ("nets.py:net", "give a module, not a file: nets:net"),
        ("nowhere.nets:net", "there is no module 'nowhere'"),
        (
            "broken:net",
            (
                "importing 'broken' failed: ModuleNotFoundError: No module named"
                " 'no_such_module_at_all' (broken.py:1)"
            ),
        ),
        ("nets:clases", "'nets' has no 'clases'; did you mean 'classes'?"),
        ("nets:a_number", "is of type int; give a Keras model, or (train_step, args)"),
        (
            "nets:nothing",
            "returns nothing (None); return a Keras model, or (train_step, args)",
        ),
        ("nets:fails", "fails when it is called: RuntimeError: no way"),
        ("nets:exits", "fails when it is called: SystemExit: 3"),
        ("nets:takes", "cannot be called without arguments (missing a required argument: 'batch')"),
        ("nets:untraceable", "cannot be traced: ZeroDivisionError: division by zero"),
        (
            "nets:no_gradients",
            "TARGET='nets:no_gradients': asks for no gradients that could be rewired",
        ),
        (
            "nets:frozen",
            "TARGET='nets:frozen': has no trainable variables; set trainable=True",
        ),
        ("lambda.keras", "TARGET='lambda.keras': contains code (a lambda)"),
        ("nets:make_step --html /dev/full", "--html='/dev/full': cannot be written: "),
        ("nets:Own", "is a model whose inputs are not known; begin it with keras.Input"),
        (
            "nets:positions",
            "the input 'tokens' has the shape (None, None); give a number for None with --length",
        ),
        ("nets:fixed --batch 8", "--batch=8: the model was built for batches of 4"),
        ("nets:whole_numbers", "has an output of type int32, which no loss can train"),
        (
            "nets:make_step --loss mse",
            "--loss='mse': nets:make_step is a training step, which has its own",
        ),
        (
            "nets:classes --optimizer adem",
            "--optimizer='adem': Keras has no such name; give one of Ada",
        ),
        ("nets:classes --loss msse", "--loss='msse': Keras has no such name; give one of Bin"),
        ("nets:classes --import gone", "--import='gone': there is no module 'gone'"),
        ("nets:classes --budget 2gigs", "--budget='2gigs': unknown unit 'gigs'"),
        ("nets:classes --budget 1.5", "--budget=1.5: a float is a fraction"),
        (
            "nets:classes --html gone/page.html",
            "--html='gone/page.html': there is no folder 'gone'",
        ),
        (
            "nets:classes --plot figure.bmp",
            "--plot='figure.bmp': give a file name that ends with .png",
        ),
    ],
)
def test_bad_input_is_said_in_a_line(folder: Path, capsys: Any, words: str, problem: str) -> None:
    (folder / "damaged.keras").write_text("no model")
    if words == "lambda.keras":
        keras.Sequential([keras.Input([4]), keras.layers.Lambda(lambda x: 2 * x)]).save(words)
    status, out, said = run(capsys, *words.split())
    assert status == 2 and not out
    assert said.startswith(f"{arguments.PROGRAM}: error: ") and problem in said


@pytest.mark.parametrize("option", ["--html", "--plot"])
def test_a_missing_extra_is_said_before_anything_takes_time(
    folder: Path, capsys: Any, monkeypatch: Any, option: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, said = run(capsys, "nets:classes", option, "figure.png")
    assert status == 2 and not out
    assert said.endswith(
        f"{option} needs matplotlib, which is not installed: pip install memsaving-gradients[plot]"
    )
    assert "nets" not in sys.modules


@pytest.mark.parametrize(
    "words",
    ["explain x --batch 0", "explain x --length y", "explore x", "", "explain x --bugdet 1"],
)
def test_wrong_usage_exits_with_2(words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        arguments.parse(words.split())
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- targets made of models


def ready(model: keras.Model, *words: str) -> target.Target:
    return models.ready(model, arguments.parse(["explain", "model", *words]))


def test_labels_and_losses_go_with_outputs() -> None:
    x = keras.Input([4, 8])
    outputs = {
        "kind": keras.layers.Dense(5, "softmax")(x),
        "sure": keras.layers.Dense(1, "sigmoid")(x),
        "much": keras.layers.Dense(2)(x),
    }
    model = keras.Model(x, outputs)
    target = ready(model)
    given, labels = target.args
    assert given == tf.TensorSpec([32, 4, 8], tf.float32)
    assert labels == {
        "kind": tf.TensorSpec([32, 4], tf.int32),
        "sure": tf.TensorSpec([32, 4, 1], tf.float32),
        "much": tf.TensorSpec([32, 4, 2], tf.float32),
    }
    assert target.assumed == (
        "batches of 32 (--batch)",
        "optimizer adam (--optimizer)",
        "loss sparse_categorical_crossentropy, mean_squared_error, binary_crossentropy (--loss)",
    )


def test_what_is_said_is_not_assumed() -> None:
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
    target = ready(model, "--optimizer", "sgd", "--loss", "mae", "--batch", "3", "--xla")
    assert target.assumed == ()
    assert isinstance(model.optimizer, keras.optimizers.SGD) and model.jit_compile
    assert target.args[1].shape == (3, 4)


def test_losses_by_name_of_output_are_found() -> None:
    x = keras.Input([8])
    model = keras.Model(x, [keras.layers.Dense(5, name="a")(x), keras.layers.Dense(5, name="b")(x)])
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", {"a": "mse", "b": sparse})
    labels = ready(model).args[1]
    assert [label.shape.as_list() for label in labels] == [[32, 5], [32]]


def test_a_model_that_was_built_by_its_shape_is_ready() -> None:
    class Two(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)

        def build(self, shape: Any) -> None:
            self.inner.build(shape)
            self.outer.build((None, 8))

        def call(self, x: Any) -> Any:
            return self.outer(self.inner(x))

    model = Two()
    model.build((None, 6))
    x, y = ready(model, "--batch", "16").args
    assert (x.shape, y.shape) == ((16, 6), (16, 2))


def test_an_optimizer_that_reads_all_gradients_is_known() -> None:
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(global_clipnorm=1.0), "mse")
    assert ready(model).options["hold_gradients"]
    model.compile("sgd", "mse")
    assert not ready(model).options["hold_gradients"]


def test_causes_are_a_line_of_bounded_length() -> None:
    assert target.cause(ValueError("a\n b")) == "ValueError: a b"
    assert target.cause(KeyError()) == "KeyError"
    assert len(target.cause(ValueError("x" * 10_000))) < 500
