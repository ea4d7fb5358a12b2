"""Tools: what an agent can call. A tool is a function from the text of a call to the text of its answer."""


class Lost(Exception):
    """Raised by a tool whose service is gone and stayed away: not an observation. The run saves what is finished and stops."""


class Failed(Exception):
    """A tool call that did not succeed; its text is what the model is shown. status: "error" or "timeout".

    lost: nothing that the call did is left, so it is not to be among the earlier calls of the next one.
    """

    def __init__(self, text, status="error", lost=False):
        super().__init__(text)
        self.status, self.lost = status, lost
