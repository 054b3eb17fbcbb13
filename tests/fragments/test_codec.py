import pytest

from diloco import errors
from diloco.fragments import codec


def test_unknown_codec_is_refused_by_name():
  with pytest.raises(errors.UserError, match=r"int3.*bf16"):
    codec.of("int3")
