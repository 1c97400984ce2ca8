"""What TensorBoard's HPARAMS page knows of a run: its parameters when it starts, and that it has finished.

No experiment is declared: TensorBoard would take the columns of the first run it finds, and leave out what others have.
Without one it makes the columns of all runs that it shows together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo


def session_start(parameters: Mapping[str, float | str | bool]) -> Summary:
    """The start of a run, with its parameters by name."""
    started = SessionStartInfo(start_time_secs=time.time())
    for given, value in parameters.items():
        name = given.encode(errors="replace").decode()
        if isinstance(value, bool):
            started.hparams[name].bool_value = value
        elif isinstance(value, str) or (isinstance(value, int) and abs(value) > sys.float_info.max):
            started.hparams[name].string_value = str(value).encode(errors="replace").decode()
        else:
            started.hparams[name].number_value = value
    return _summary(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=started))


def session_end() -> Summary:
    """The end of a run that has finished."""
    ended = SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=ended))


def _summary(tag: str, content: HParamsPluginData) -> Summary:
    content.version = metadata.PLUGIN_DATA_VERSION
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString())
    value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
