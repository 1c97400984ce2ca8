"""Names that say that a value is secret: shown as ***, and named at a submission."""

from __future__ import annotations

import pytest

from jobkit.run.secrets import is_secret, masked, warning

SECRET = [
    "token", "hf_token", "HF_TOKEN", "hf-token", "hfToken", "api_key", "apikey", "apiKey", "wandb_key", "password",
    "db_password2", "secret", "client_secret_id", "params.a.token", "params.secrets.hf",
]  # fmt: skip
PUBLIC = ["lr", "tokens", "max_tokens", "tokenizer", "key", "keys", "monkey", "num_keys", "token_dim", "passes", ""]


@pytest.mark.parametrize("name", SECRET + PUBLIC)
def test_a_name_says_that_a_value_is_secret(name: str) -> None:
    assert is_secret(name) is (name in SECRET)


def test_only_texts_are_secrets_and_expressions_are_shown() -> None:
    params = {"lr": 1, "max_token": 5, "token": True, "api_key": "", "a": {"hf_token": "abc", "keys": ["x"]}}
    params |= {
        "passwords": ["one", 2],
        "secret": {"inner": "x"},
        "my_token": "${oc.env:HF_TOKEN}",
        "pad_token": "<pad>",
        "cls_token": "[CLS]",
    }
    hidden = {"a": {"hf_token": "***", "keys": ["x"]}, "passwords": ["***", 2], "secret": {"inner": "***"}}
    assert masked(params) == params | hidden
    assert "params.a.hf_token, params.passwords, params.secret.inner:" in warning(params)
    assert warning({"lr": 1, "my_token": "${oc.env:HF_TOKEN}", "n_key": 3}) == ""
