"""The site builds without a warning, and its pages are the repository's own documents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from docs.house import ROOT
from docs.site_pages import PAGES, links_in_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    # With --quiet, mkdocs would not count warnings either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_each_document_is_a_page(site: Path) -> None:
    documents = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    documents += [Path(name) for name in PAGES.values()]
    missing = [str(path) for path in documents if not (site / path.with_suffix(".html")).exists()]
    assert not missing
    assert not list(site.rglob("*.py"))  # what writes the documents is no page


def test_recipes_are_files_of_the_site(site: Path) -> None:
    recipes = ("slurm/train.sbatch", "ssh/swift-ssh.sh", "kubernetes/statefulset.yaml")
    assert [name for name in recipes if not (site / "deploy" / name).exists()] == []
    assert "../deploy/slurm/train.sbatch" in (site / "how-to" / "slurm.html").read_text()


def test_the_readme_is_the_landing_page(site: Path) -> None:
    landing = (site / "index.html").read_text()
    assert "A recovery runtime for distributed training with" in landing
    assert 'src="demo.svg"' in landing
    assert 'href="guide.html' in landing


def test_the_interface_comes_from_the_docstrings(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in ("session.Session.attach_pipeline", "session.Session.attach_ddp", "optim.wrap_optimizer"):
        assert f'id="swift_ft.{name}"' in page


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[a](docs/guide.md#data)", "[a](guide.md#data)"),
        ("README.md", "![a](docs/recovery.svg)", "![a](recovery.svg)"),
        ("README.md", "[a](CHANGELOG.md)", "[a](changelog.md)"),
        ("README.md", "[a](https://example.org/x.md) [b](#part)", "[a](https://example.org/x.md) [b](#part)"),
        ("docs/undo.md", "[a](../benchmarks/HISTORY.md#proof)", "[a](results-history.md#proof)"),
        ("docs/how-to/llama.md", "[a](gpt2.md) [b](../guide.md#data)", "[a](gpt2.md) [b](../guide.md#data)"),
        ("docs/how-to/llama.md", "[a](../../benchmarks/RESULTS.md)", "[a](../results.md)"),
        ("docs/how-to/ssh.md", "[a](../../deploy/ssh/swift-ssh.sh)", "[a](../deploy/ssh/swift-ssh.sh)"),
        ("docs/how-to/gpt2.md", "```python\nx[0](../a.py)\n```\n", "```python\nx[0](../a.py)\n```\n"),
        ("benchmarks/HISTORY.md", "![a](figures/figure-9.png)", "![a](figures/figure-9.png)"),
        ("benchmarks/RESULTS.md", "[a](results/README.md)", "[a](results-format.md)"),
    ],
)
def test_links_as_the_site_has_them(source: str, link: str, expected: str) -> None:
    assert links_in_site(link, source) == expected
