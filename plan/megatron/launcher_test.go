package megatron

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Every flag of a launcher is read alone, under all its names; what is no number of nodes or processes is
// kept where it stands for one.
func TestLauncherFlags(t *testing.T) {
	for text, want := range map[string]launcher{
		"--nnodes 2": {nodes: 2}, "--nnodes=2": {nodes: 2}, "-N 3": {nodes: 3}, "--nodes '4'": {nodes: 4}, "nodes 4": {},
		"--nproc_per_node=8": {each: 8}, "--nproc-per-node \"8\"": {each: 8}, "--ntasks-per-node 2": {tasks: 2},
		"--gpus-per-node=h100:4": {gpus: 4}, "--gres gpu:h100:4": {gpus: 4}, "--num_gpus 5": {gpus: 5},
		"-n 6": {all: 6}, "-np 6": {all: 6}, "--ntasks=6": {all: 6}, "-n": {},
		"--nnodes 0": {unset: "0"}, "--nnodes 1:4": {unset: "1:4"}, "--nnodes": {}, "--nnodes --x": {}, "--nnodes=": {},
		"--nproc-per-node auto": {unsetEach: "auto"}, "--nproc-per-node --x": {}, "--ntasks-per-node x": {unsetEach: "x"}, "-n x": {}, "-N x": {}, "--nodes x": {unset: "x"},
		fmt.Sprintf("-n %d", mostGPUs): {all: mostGPUs}, fmt.Sprintf("-n %d", mostGPUs+1): {},
		"srun -N4 -n16": {nodes: 4, all: 16}, "srun -N four": {unset: "four"}, "srun -n $N": {unsetEach: "$N"}, "srun --nodes=2-4": {unset: "2-4"},
		"srun -G 16": {gpusAll: 16}, "srun --gpus=a100:16 --gpus-per-task=1": {gpusAll: 16, gpusTask: 1}, "docker run --gpus all": {}, "python -n x": {unsetEach: "x"},
		"--gres=gpu": {gpus: 1}, "--gres=gpu:a100": {gpus: 1}, "--gres=gpu:8,shm:2": {gpus: 8}, "--gres=shm:2,gpu:h100:4(S:0-1)": {gpus: 4}, "--gres=craynetwork:4": {},
		"--gres=gpu:h100:many": {unsetEach: "many"}, "--gpus-per-node eight": {unsetEach: "eight"},
		"deepspeed --num_gpus 8 --num_nodes=4": {nodes: 4, each: 8}, "deepspeed --include localhost:0,1,2": {nodes: 1, each: 3}, "deepspeed -i a:0,1@b:2,3": {nodes: 2, each: 2},
		"deepspeed --include a:0,1@b:2": {nodes: 2, unsetEach: "a:0,1 b:2"}, "deepspeed --include a@b": {nodes: 2}, "deepspeed --hostfile=/job/hosts --num_gpus 8": {each: 8, unset: "in hosts"},
		"deepspeed --exclude b:0": {unset: "all hosts but b:0"}, "python -m deepspeed.launcher.runner --num_gpus 2": {each: 2},
		"accelerate launch --num_processes 16 --num_machines 2": {world: 16, nodes: 2}, "accelerate launch --num_processes $N": {unsetEach: "$N"},
		"mpirun -np 16 -N 8": {world: 16, tasks: 8}, "mpirun -n 16 --map-by ppr:8:node --npernode 4": {world: 16, tasks: 4}, "mpirun --map-by slot --np 2": {world: 2},
		"mpirun -H a:8,b:8": {nodes: 2, each: 8}, "mpirun --host a:8": {nodes: 1, each: 8}, "mpirun -H a:8,b:4 -np 12": {nodes: 2, unsetEach: "a:8 b:4", world: 12},
		"mpirun -H a,b -np 2": {nodes: 2, world: 2}, "mpiexec -f hosts -ppn 8": {tasks: 8, unset: "in hosts"},
		"srun -N 2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8": {nodes: 2, tasks: 1, each: 8}, "srun -N 2 /opt/bin/deepspeed --num_gpus 8": {nodes: 2, each: 8},
		"-N 2 -n 16 --nproc-per-node 8 --ntasks-per-node 4 --gres=gpu:3": {nodes: 2, all: 16, each: 8, tasks: 4, gpus: 3},
	} {
		if got := launcherOf(strings.Fields(text)); got != want {
			t.Errorf("%s is %+v, want %+v", text, got, want)
		}
	}
	// What a launcher states wins over what another does, but for numbers of Slurm, of which the larger counts.
	one, two := launcher{1, 2, 3, 4, 5, 6, 7, 8, "a", "b"}, launcher{11, 12, 13, 14, 15, 16, 17, 18, "c", "d"}
	for _, c := range []struct{ l, other, want launcher }{
		{one, two, launcher{1, 2, 13, 14, 15, 6, 7, 8, "a", "b"}}, {two, one, two}, {launcher{}, two, two}, {two, launcher{}, two},
	} {
		got := c.l
		if got.or(c.other); got != c.want {
			t.Errorf("%+v with %+v is %+v, want %+v", c.l, c.other, got, c.want)
		}
	}
	for want, l := range map[string]launcher{
		"":                           {},
		"nnodes=3 nproc-per-node=8":  {nodes: 3, each: 8, tasks: 4, gpus: 2, all: 6},
		"nnodes=3 nproc-per-node=4":  {nodes: 3, tasks: 4, gpus: 2, all: 6},
		"nnodes=3 nproc-per-node=2":  {nodes: 3, tasks: 1, gpus: 2, all: 9},
		"nnodes=3 nproc-per-node=5":  {nodes: 3, tasks: 1, all: 15, unset: "x"},
		"nnodes=3":                   {nodes: 3, all: 16},
		"nnodes=x nproc-per-node=16": {all: 16, unset: "x", unsetEach: "y"},
		"nnodes=2 nproc-per-node=6":  {nodes: 2, world: 12, tasks: 8, gpus: 8},
		"nproc-per-node=12":          {nodes: 5, world: 12, tasks: 8, unset: "in hosts"},
		"nproc-per-node=16":          {world: 16, tasks: 8, unset: "in hosts"},
		"nnodes=2 nproc-per-node=1":  {nodes: 2, world: 4, each: 1},
		"nnodes=2 nproc-per-node=7":  {nodes: 2, gpusAll: 14, all: 4},
		"nnodes=2 nproc-per-node=10": {nodes: 2, tasks: 1, gpusTask: 10, gpusAll: 14},
		"nnodes=x nproc-per-node=y":  {unset: "x", unsetEach: "y"},
		"nnodes=2 nproc-per-node=16": {all: 32, tasks: 16}, // Slurm takes as many nodes as that takes
		"nnodes=4 nproc-per-node=8":  {all: 4, tasks: 1, each: 8},
		"nproc-per-node=5":           {all: 16, tasks: 5},
		"nnodes=z nproc-per-node=8":  {all: 16, tasks: 8, unset: "z"},
	} {
		args := map[string]any{}
		if l.write(args); flat(args) != want {
			t.Errorf("%+v is written as %q, want %q", l, flat(args), want)
		}
	}
}

// A job that the launcher does not size by a number is noted, and one that it does is as large.
func TestLaunchersOfJobs(t *testing.T) {
	const job = " pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128 --vocab-size 128 --micro-batch-size 1"
	for _, c := range []struct {
		text  string
		world int
		note  string
	}{
		{"deepspeed --num_gpus 8 --num_nodes 4" + job, 32, ""},
		{"deepspeed --include localhost:0,1,2" + job, 3, ""},
		{"deepspeed --hostfile hosts --num_gpus 8" + job, 8, "--nnodes: is in hosts, which is not read; 1 x 8 GPUs, the fewest with this layout, are assumed"},
		{"deepspeed" + job, 1, "the number of GPUs is not in the arguments"},
		{"#SBATCH --nodes=4\nsrun deepspeed --num_gpus 8" + job, 32, ""},
		{"accelerate launch --num_processes 16 --num_machines 2" + job, 16, ""},
		{"accelerate launch --num_processes 12 --num_machines 5" + job, 12, ""},
		{"accelerate launch --config_file a.yaml" + job, 1, "the number of GPUs is not in the arguments"},
		{"mpirun -np 16 -N 8" + job, 16, ""},
		{"mpirun -np 16 --hostfile hosts" + job, 16, ""},
		{"#SBATCH --nodes=four\n#SBATCH --gpus-per-node=8\nsrun python" + job, 8, "--nnodes: is four, which is no number; 1 x 8 GPUs, the fewest with this layout, are assumed"},
		{"#SBATCH --nodes=4\n#SBATCH --gpus-per-node=eight\nsrun python" + job, 1, "--nproc-per-node: is eight: the number of GPUs is not in the arguments"},
		{"#SBATCH -N4\n#SBATCH --gres=gpu:a100:4,shm:1\nsrun python" + job, 16, ""},
		{"#!/bin/sh\n#SBATCH --nodes=2\n\n# more\n#SBATCH --ntasks-per-node=8\necho hi\n#SBATCH --nodes=16\nsrun python" + job, 16, ""},
		{"#SBATCH --gpus=16\n#SBATCH -N 2\nsrun python" + job, 16, ""},
	} {
		args, err := parseCommand(c.text, ParseOptions{})
		if err != nil {
			t.Fatal(err)
		}
		s, warnings, err := FromArgs(args, Options{})
		if err != nil {
			t.Fatalf("%s: %v", c.text, err)
		}
		about := func(w Warning) bool { return strings.Contains(w.String(), "GPUs") }
		if s.Layout.World != c.world || c.note == "" && slices.ContainsFunc(warnings, about) {
			t.Errorf("%s: %d GPUs, want %d; %v", c.text, s.Layout.World, c.world, warnings)
		}
		if c.note != "" && !slices.ContainsFunc(warnings, func(w Warning) bool { return strings.Contains(w.String(), c.note) }) {
			t.Errorf("%s: the notes are %v, want %s", c.text, warnings, c.note)
		}
	}
}
