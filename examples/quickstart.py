import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshfeed

tokens = np.random.default_rng(0).integers(0, 50_000, (10_000, 128), np.int32)  # or meshfeed.sources.ArrayRecord(…)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
feed = meshfeed.Feed(
    {"tokens": tokens}, NamedSharding(mesh, PartitionSpec("data")), global_batch_size=64, shuffle=True, seed=0
)
feed.start()  # opens the data and reads ahead in the background, while you create the model and compile the step
for batch in feed:  # {"tokens": jax.Array int32[64, 128]}, over the whole mesh
    loss = batch["tokens"].mean()  # your step
    if feed.step % 20 == 0:
        print(f"step {feed.step}, loss {loss:,.0f}")  # waits for the step
    if feed.step == 100:
        break
state = feed.get_state()  # a small JSON dict; feed.set_state(state) resumes here, on any number of hosts
print(f"step {feed.step}, {feed.position:,} of {len(tokens):,} records, state of {len(str(state))} characters")
