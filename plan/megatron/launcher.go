// This file owns the GPUs that launchers ask for: torchrun, Slurm, MPI, DeepSpeed's launcher and
// accelerate.

package megatron

import (
	"cmp"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// launcher is the size of a job as its launchers state it. Zero is not stated.
type launcher struct {
	nodes, each int // of torchrun, and of deepspeed
	tasks, gpus int // on a node, of Slurm and MPI
	all         int // tasks in all, of Slurm
	world       int // processes in all, of accelerate and MPI, which are one for each GPU
	gpusAll     int // GPUs in all, of Slurm
	gpusTask    int // GPUs of a task, of Slurm

	// What stands for the nodes and for the processes on each, if it is no number: a
	// variable that the text does not set, a range, a word such as auto, or a file of hosts.
	unset, unsetEach string
}

// launcherFlags are the flags that count wherever they stand before a program, under all their
// names.
var launcherFlags = map[string]string{
	"nnodes": "nodes", "nodes": "nodes", "N": "nodes", "nproc-per-node": "each", "ntasks-per-node": "tasks", "gpus-per-node": "gpus",
	"gres": "gpus", "ntasks": "all", "n": "all", "np": "all", "num-gpus": "gpus",
}

// toolFlags are flags that count, or mean something else, behind the name of a launcher.
var toolFlags = map[string]map[string]string{
	"slurm": {"gpus": "gpusAll", "G": "gpusAll", "gpus-per-task": "gpusTask"},
	"mpi": {
		"N": "tasks", "npernode": "tasks", "ppn": "tasks", "perhost": "tasks", "map-by": "ppr", "n": "world", "np": "world", "c": "world",
		"H": "hosts", "host": "hosts", "hosts": "hosts", "hostfile": "file", "machinefile": "file", "f": "file",
	},
	"deepspeed": {
		"num-gpus": "each", "num-nodes": "nodes", "include": "include", "i": "include", "exclude": "exclude", "e": "exclude", "hostfile": "file", "H": "file",
	},
	"accelerate": {"num-processes": "world", "num-machines": "nodes"},
}

// batchWord begins a line of a script that Slurm reads.
const batchWord = "#SBATCH"

// tools are the launchers by the names of their programs.
var tools = map[string]string{
	"srun": "slurm", "sbatch": "slurm", "salloc": "slurm", batchWord: "slurm",
	"mpirun": "mpi", "mpiexec": "mpi", "mpiexec.hydra": "mpi", "orterun": "mpi", "prterun": "mpi", "horovodrun": "mpi",
	"deepspeed": "deepspeed", "deepspeed.launcher.runner": "deepspeed", "accelerate": "accelerate", "accelerate.commands.launch": "accelerate",
	"torchrun": "torchrun", "python": "torchrun", "python3": "torchrun",
}

func launcherOf(words []string) (l launcher) {
	l.add(words)
	return l
}

// add reads the flags of launchers, of which one may start the next.
func (l *launcher) add(words []string) {
	tool := ""
	for i, w := range words {
		if named := tools[path.Base(w)]; named != "" {
			tool = named
			continue
		}
		name, value, has := strings.Cut(w, "=")
		name, dashed := strings.CutPrefix(strings.ReplaceAll(name, "_", "-"), "-")
		name, long := strings.CutPrefix(name, "-")
		if short := shortNumber.FindStringSubmatch(name); short != nil && dashed && !long && tool == "slurm" { // -N4
			name, value, has = short[1], short[2], true
		}
		kind := cmp.Or(toolFlags[tool][name], launcherFlags[name])
		if !dashed || kind == "" {
			continue
		}
		if !has && i+1 < len(words) {
			value = words[i+1]
		}
		if value = strings.Trim(value, `"'`); value == "" || strings.HasPrefix(value, "--") {
			continue
		}
		l.read(tool, name, kind, value)
	}
}

var shortNumber = regexp.MustCompile(`^([NnG])([0-9]+)$`)

// read adds what one flag says.
func (l *launcher) read(tool, name, kind, value string) {
	switch kind {
	case "hosts": // host:8,other:8
		l.hosts(strings.Split(value, ","), func(slots string) int {
			n, _ := strconv.Atoi(slots)
			return n
		})
		return
	case "include": // host:0,1,2@other:0,1,2
		l.hosts(strings.Split(value, "@"), func(slots string) int { return len(strings.Split(slots, ",")) })
		return
	case "exclude":
		l.unset = "all hosts but " + marks.Replace(value)
		return
	case "file":
		l.unset = "in " + path.Base(marks.Replace(value))
		return
	case "ppr": // ppr:8:node
		parts := strings.Split(value, ":")
		if len(parts) < 3 || parts[0] != "ppr" || parts[2] != "node" {
			return
		}
		kind, value = "tasks", parts[1]
	}
	if name == "gres" {
		value = gresGPUs(value)
	} else if kind == "gpus" || kind == "gpusAll" || kind == "gpusTask" {
		value = value[strings.LastIndexByte(value, ':')+1:]
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 || n > mostGPUs {
		l.open(tool, name, kind, value)
		return
	}
	*map[string]*int{
		"nodes": &l.nodes, "each": &l.each, "tasks": &l.tasks, "gpus": &l.gpus, "all": &l.all, "world": &l.world, "gpusAll": &l.gpusAll, "gpusTask": &l.gpusTask,
	}[kind] = n
}

// open keeps what is no number. A short flag may be that of any program, unless it stands behind
// a launcher.
func (l *launcher) open(tool, name, kind, value string) {
	switch {
	case value == "" || len(name) < 3 && tool == "" && !(kind == "nodes" && isVariable(value)):
	case kind == "nodes":
		l.unset = marks.Replace(value)
	default:
		l.unsetEach = marks.Replace(value)
	}
}

// gresGPUs returns the GPUs among generic resources of Slurm, such as gpu:h100:8(S:0-1),shm:1.
// A resource without a number is one. It returns nothing if there are no GPUs.
func gresGPUs(value string) string {
	for item := range strings.SplitSeq(value, ",") {
		item, _, _ = strings.Cut(item, "(")
		parts := strings.Split(strings.TrimPrefix(item, "gres/"), ":")
		if parts[0] != "gpu" && len(parts) > 1 {
			continue
		}
		last := parts[len(parts)-1]
		if _, err := strconv.Atoi(last); err == nil || isVariable(last) || len(parts) > 2 {
			return last
		}
		if parts[0] == "gpu" {
			return "1"
		}
	}
	return ""
}

// hosts reads a list of nodes. count returns how many processes the slots of a node are, and
// nodes without slots leave that open, as do nodes with different ones.
func (l *launcher) hosts(list []string, count func(slots string) int) {
	least, most := mostGPUs, 0
	for _, host := range list {
		n := 0
		if _, slots, given := strings.Cut(host, ":"); given {
			n = count(slots)
		}
		least, most = min(least, n), max(most, n)
	}
	if l.nodes = len(list); least == most && least > 0 {
		l.each = least
	} else if most > 0 {
		l.unsetEach = marks.Replace(strings.Join(list, " "))
	}
}

// or fills in what another launcher states.
func (l *launcher) or(other launcher) {
	l.nodes, l.each = cmp.Or(l.nodes, other.nodes), cmp.Or(l.each, other.each)
	l.unset, l.unsetEach = cmp.Or(l.unset, other.unset), cmp.Or(l.unsetEach, other.unsetEach)
	l.world, l.gpusAll, l.gpusTask = cmp.Or(l.world, other.world), cmp.Or(l.gpusAll, other.gpusAll), cmp.Or(l.gpusTask, other.gpusTask)
	l.tasks, l.gpus, l.all = max(l.tasks, other.tasks), max(l.gpus, other.gpus), max(l.all, other.all)
}

// write adds the nodes and the processes on each under torchrun's names.
func (l *launcher) write(args map[string]any) {
	if l.world > 0 && l.each == 0 && (l.nodes == 0 || l.world%l.nodes != 0) {
		l.nodes, l.unset = 0, "" // all processes are counted, wherever they run
	}
	if l.nodes == 0 && l.unset == "" && l.tasks > 0 && l.all%l.tasks == 0 {
		l.nodes = l.all / l.tasks // which Slurm takes
	}
	nodes := max(l.nodes, 1)
	shared := func(n int) bool { return n > 0 && n%nodes == 0 }
	each := l.each
	switch {
	case each > 0:
	case shared(l.world):
		each = l.world / nodes
	case l.tasks > 1:
		each = l.tasks
	case l.gpus > 0:
		each = l.gpus
	case l.tasks*l.gpusTask > 0:
		each = l.tasks * l.gpusTask
	case shared(l.gpusAll):
		each = l.gpusAll / nodes
	case shared(l.all):
		each = l.all / nodes
	}
	if l.nodes > 0 {
		args["nnodes"] = []string{strconv.Itoa(l.nodes)}
	} else if l.unset != "" {
		args["nnodes"] = []string{l.unset}
	}
	if each > 0 {
		args["nproc-per-node"] = []string{strconv.Itoa(each)}
	} else if l.unsetEach != "" {
		args["nproc-per-node"] = []string{l.unsetEach}
	}
	for _, name := range slices.Sorted(maps.Keys(launcherFlags)) {
		if name != "nnodes" && name != "nproc-per-node" {
			delete(args, name) // they were the launcher's
		}
	}
}
