"""vLLM on CPU repacks weights after loading, so a sync must go through its reload path."""

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CPUExtension(vLLMColocateWorkerExtension):
    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        found = []
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=lambda w, last: found.extend((n, t.clone()) for n, t in w))
        self.reload_weights(weights_iterator=iter(found), is_checkpoint_format=True)
