// This file owns which engine the ranks of several processes use for their collectives.

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	ranks "github.com/stowage-dev/stowage/internal/comm/nccl"
	"github.com/stowage-dev/stowage/internal/nccl"
	"github.com/stowage-dev/stowage/memory"
)

// engineVariable chooses the engine of collectives.
const engineVariable = "STOWAGE_COLLECTIVES"

// engine is what a process can say about NCCL.
type engine struct {
	Want string // nccl, mpi, or nothing for the better one
	GPU  string // identifies the GPU, or nothing for the CPU
	NCCL int    // the version that was found
	Why  string // why there is none
}

// chooseEngine finds out, with all other processes, whether to use NCCL. They do if all have a
// GPU of their own and a library.
func (c *cluster) chooseEngine(dev device.Device) (*nccl.Library, error) {
	mine := engine{Want: os.Getenv(engineVariable)}
	var lib *nccl.Library
	if i := dev.Info(); i.Backend == "cuda" {
		// NCCL takes processes with different ids of their host for those of two machines.
		mine.GPU = fmt.Sprintf("%s %s %s %d", c.place.Host, os.Getenv("NCCL_HOSTID"), os.Getenv("CUDA_VISIBLE_DEVICES"), i.Ordinal)
		var err error
		if lib, err = nccl.Open(os.Getenv); err != nil {
			mine.Why = err.Error()
		} else {
			mine.NCCL = lib.Version
		}
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	texts, err := c.process.Control.Gather(text)
	if err != nil {
		return nil, err
	}
	all := make([]engine, len(texts))
	for i, text := range texts {
		if err := json.Unmarshal(text, &all[i]); err != nil {
			return nil, err
		}
	}
	why, err := useNCCL(all)
	if err != nil {
		return nil, err
	}
	if why != nil {
		if all[0].GPU != "" && all[0].Want == "" && c.speaks() && !c.saidMPI {
			c.saidMPI = true
			say(c.cmd.ErrOrStderr(), fmt.Sprintf("note: data travels over MPI and pinned host memory instead of NCCL; %s\n", c.words(why)))
		}
		return nil, nil
	}
	return lib, nil
}

// checkEngine refuses engines that do not exist.
func checkEngine(want string) error {
	if want != "" && want != "nccl" && want != "mpi" {
		return usagef("%s is %q; choose nccl or mpi, or leave it out for the better one", engineVariable, want)
	}
	return nil
}

// useNCCL decides from what all processes say. It returns why they do not use NCCL.
func useNCCL(all []engine) (why, err error) {
	want := all[0].Want
	if err := checkEngine(want); err != nil {
		return nil, err
	}
	seen := map[string]int{}
	for r, e := range all {
		other, twice := seen[e.GPU]
		seen[e.GPU] = r
		switch {
		case e.Want != want:
			return nil, usagef("%s is %q on rank 0 and %q on rank %d; set it alike everywhere", engineVariable, want, e.Want, r)
		case why != nil:
		case e.GPU == "":
			why = errors.New("NCCL needs GPUs; give --device cuda")
		case e.NCCL == 0:
			why = fmt.Errorf("rank %d: %s", r, e.Why)
		case e.NCCL/100 != all[0].NCCL/100 && all[0].NCCL > 0:
			why = fmt.Errorf("rank %d has NCCL %s and rank 0 has %s; install the same version everywhere", r, nccl.Words(e.NCCL), nccl.Words(all[0].NCCL))
		case twice:
			why = fmt.Errorf("ranks %d and %d share a GPU, which NCCL does not allow; start fewer processes a machine", other, r)
		}
	}
	switch {
	case want == "nccl" && why != nil:
		return nil, usagef("%s is nccl, but %v", engineVariable, why)
	case want == "mpi":
		return errors.New("it is not wanted"), nil
	}
	return why, nil
}

// openNCCL makes a communicator of all processes over NCCL, with one of MPI for their hosts.
func (c *cluster) openNCCL(lib *nccl.Library, dev device.Device, name string) (comm.Comm, error) {
	var last atomic.Value // the call of NCCL that hosts compare
	last.Store("")
	host, err := c.openMPI(c.host, name, 64*memory.KiB, func(call string, absent []int) {
		if len(absent) > 0 { // letters of that call have not come
			c.session.Note(last.Load().(string), absent)
		}
	})
	if err != nil {
		return nil, err
	}
	x, err := ranks.Open(lib, dev, ranks.Options{Host: host, HostDevice: c.host, Order: &c.order, Note: func(call string) {
		last.Store(call)
		c.note(call, nil)
	}})
	if err != nil {
		return nil, errors.Join(err, host.Close())
	}
	return x, nil
}
