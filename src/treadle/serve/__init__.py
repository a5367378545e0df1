"""Compiled forwards and language models over HTTP: `treadle serve`, or an ASGI application."""

from treadle.serve.access import check_address as check_address
from treadle.serve.access import read_token as read_token
from treadle.serve.application import application as application
from treadle.serve.limits import Limits as Limits
from treadle.serve.server import run as run
from treadle.serve.service import Service as Service
