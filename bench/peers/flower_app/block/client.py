"""A node that adds its number to the block instead of training it."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    (block,) = message.content["arrays"].to_numpy_ndarrays()
    block = block + block.dtype.type(context.node_config["number"])
    told = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord([block]), "metrics": told})
    return Message(content=content, reply_to=message)
