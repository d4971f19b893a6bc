#!/bin/bash
# per_device_batch_size=99 is a comment
export LIBTPU_INIT_ARGS=""
python3 -m maxtext.trainers.pre_train.train src/maxtext/configs/base.yml run_name=mixtral \
  model_name=mixtral-8x7b per_device_batch_size=4 max_target_length=4096 \
  ici_fsdp_parallelism=-1 ici_expert_parallelism=8 \
  sparse_matmul=False megablox=False capacity_factor=1.25 remat_policy=full dtype=bfloat16 quantization=fp8
