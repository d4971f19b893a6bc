// This file owns --doctor: a plan takes the memory that `stowage doctor` found free on a
// machine, and not what its hardware usually leaves.

package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/doctor"
	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/planview"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
)

// examined is what a report of `stowage doctor` says about the GPUs of a machine.
type examined struct {
	gpu  string       // the model
	gpus int          // how many there are of it
	free memory.Bytes // device memory that is free on the fullest of them
	host memory.Bytes // that is available
}

// readDoctor reads the report that --doctor names. Of several models of GPUs it takes the
// one that --gpu names.
func (j *jobFlags) readDoctor() (*examined, error) {
	wrong := func(format string, args ...any) error {
		return usagef("--doctor %s: %s", j.doctor, fmt.Sprintf(format, args...))
	}
	data, err := j.doctorText()
	if err != nil {
		return nil, err
	}
	var r doctor.Report
	if err := json.Unmarshal(data, &r); err != nil || r.Version == "" || r.Devices == nil {
		return nil, wrong("this is not what `stowage doctor --json` prints; print it again on a node of the job")
	}
	x := &examined{host: r.Machine.Memory.Usable()}
	r.Devices = slices.DeleteFunc(r.Devices, func(d doctor.Device) bool { return !strings.HasPrefix(d.Name, "cuda:") })
	for _, d := range r.Devices {
		if !j.sameGPU(d.Model, !slices.ContainsFunc(r.Devices, func(y doctor.Device) bool { return y.Model != d.Model })) {
			continue
		}
		switch {
		case d.Free < 1 || d.Free > d.Total:
			return nil, wrong("it does not say how much memory of %s is free; print it again while the GPU can be used", d.Name)
		case x.gpus > 0 && d.Model != x.gpu:
			return nil, wrong("the machine has a %s and a %s; name one of them with --gpu", x.gpu, d.Model)
		case x.gpus == 0 || d.Free < x.free:
			x.free = d.Free
		}
		x.gpu, x.gpus = d.Model, x.gpus+1
	}
	switch {
	case x.gpus == 0 && j.gpu != "":
		return nil, wrong("there is no %s in it; leave --gpu out, or print it on a machine with one", j.gpu)
	case x.gpus == 0:
		return nil, wrong("there is no GPU in it; print it on a node of the job, or leave --doctor out")
	}
	if j.gpu == "" {
		if _, err := hardware.ByName(x.gpu); err != nil {
			return nil, wrong("the figures of %s are not built in; add --gpu FILE.json with them, or the name of a GPU like it", x.gpu)
		}
	}
	return x, nil
}

// doctorText returns the text that --doctor names. Standard input may be that or a launch
// file.
func (j *jobFlags) doctorText() ([]byte, error) {
	if j.doctor == "-" && slices.Contains([]string{j.megatron, j.launch}, "-") {
		return nil, usagef("--doctor -: standard input is the launch file already; save one of the two and name its file")
	}
	if j.doctor == "-" {
		return j.readStdin("--doctor")
	}
	data, err := input.ReadFile(j.doctor, input.Settings)
	if err != nil {
		return nil, usagef("--doctor %s: the file cannot be read: %w", j.doctor, input.Cause(err))
	}
	return data, nil
}

// sameGPU reports whether --gpu means this model of a machine: it names no built-in hardware,
// or the model, or the model is not built in and the only one.
func (j *jobFlags) sameGPU(model string, only bool) bool {
	asked, err := hardware.ByName(j.gpu)
	if err != nil {
		return true // it is empty or a file, or an error that the planner reports
	}
	found, err := hardware.ByName(model)
	if err != nil {
		return only
	}
	return found.Name == asked.Name
}

// apply replaces what the setup's hardware usually leaves by what was measured. What a job
// needs beside the allocator is the same.
func (x *examined) apply(s *plan.Setup, file string) error {
	h := *s.Hardware
	beside := h.Memory - h.Usable
	if x.free <= beside {
		return usagef("--doctor %s: only %s are free on a %s, and a job needs %s for contexts and communication alone; end what else uses the GPU, and print it again",
			file, planview.Size(x.free), x.gpu, planview.Size(beside))
	}
	h.Free, h.Usable = x.free, min(h.Usable, x.free-beside)
	if h.NodeGPUs = x.gpus; x.host > 0 {
		h.NodeMemory = x.host
	}
	s.Hardware = &h
	return nil
}
