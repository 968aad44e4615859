"""Secrets that errors and last lines may hold, and texts that only look like them."""

from __future__ import annotations

import json

import pytest

from swift_ft.program.secrets import without_secrets


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("cannot open s3://me:pa:s@s@host/x", "cannot open s3://***@host/x"),
        ("http://me:hunter2@proxy:3128/ refused", "http://***@proxy:3128/ refused"),
        ("redis://:hunter2@cache:6379", "redis://***@cache:6379"),
        (
            "GET https://b.s3.amazonaws.com/x?X-Amz-Credential=AKIA%2F2026&X-Amz-Date=7&X-Amz-Signature=ab12",
            "GET https://b.s3.amazonaws.com/x?X-Amz-Credential=***&X-Amz-Date=7&X-Amz-Signature=***",
        ),
        ("https://a.blob.core.net/x?sv=2024&sig=ab%3D", "https://a.blob.core.net/x?sv=2024&sig=***"),
        (
            "https://x/y?AWSAccessKeyId=AKIA&Expires=1&Signature=ab12",
            "https://x/y?AWSAccessKeyId=***&Expires=1&Signature=***",
        ),
        ("login(token=hf_abc, user=me)", "login(token=***, user=me)"),
        ("connect(password='hunter2')", "connect(password='***')"),
        ("{'user': 'me', 'password': 'hunter2'}", "{'user': 'me', 'password': '***'}"),
        ("WANDB_API_KEY=0123abc python train.py", "WANDB_API_KEY=*** python train.py"),
        ("Authorization: Bearer ab12.cd", "Authorization: Bearer ***"),
    ],
)
def test_a_secret_is_left_out(text: str, left: str) -> None:
    assert without_secrets(text) == left
    assert without_secrets(left) == left
    in_json = json.dumps({"reason": f'"{text}"', "by": "me@host"})
    assert json.loads(without_secrets(in_json)) == {"reason": f'"{left}"', "by": "me@host"}


@pytest.mark.parametrize(
    "text",
    [
        "http://host:29500/path said no to me@there",
        "unknown pad_token=<pad>, max_tokens=512, tokenizer=bpe",
        "the token is missing: token = ",
        "KeyError: 'password'",
        "got sig=15, Signature=(a, b)",
        "Bearer of bad news",
        '{"address":"tcp://a:1","by":"me@there"}',
    ],
)
def test_what_only_looks_like_one_stays(text: str) -> None:
    assert without_secrets(text) == text
