"""Tools: what an agent can call. A tool is a function from the text of a call to the text of its answer."""


class Lost(Exception):
    """Raised by a tool whose service is gone and stayed away: not an observation. The run saves what is finished and stops."""
