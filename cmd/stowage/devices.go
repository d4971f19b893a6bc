// This file owns --device, and opening the device that it names.

package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/blas"
	"github.com/stowage-dev/stowage/internal/comm/nccl"
)

// deviceChoice is the value of --device: "cpu", "cuda", or "cuda:1" for the
// second GPU.
type deviceChoice struct {
	backend string
	ordinal int
	shared  bool // among processes
}

func (c *deviceChoice) String() string {
	if c.ordinal == 0 {
		return c.backend
	}
	return fmt.Sprintf("%s:%d", c.backend, c.ordinal)
}

func (c *deviceChoice) Type() string { return "device" }

func (c *deviceChoice) Set(s string) error {
	backend, number, numbered := strings.Cut(s, ":")
	ordinal, err := 0, error(nil)
	if numbered {
		ordinal, err = strconv.Atoi(number)
	}
	if err != nil || ordinal < 0 || strings.HasPrefix(number, "+") || backend != "cuda" && s != "cpu" {
		return errors.New("choose cpu, cuda, or cuda:1 for the second GPU")
	}
	*c = deviceChoice{backend: backend, ordinal: ordinal}
	return nil
}

// deviceFlag adds --device to a command.
func deviceFlag(cmd *cobra.Command) *deviceChoice {
	c := &deviceChoice{backend: "cpu"}
	cmd.Flags().Var(c, "device", "`device` to use: cpu, cuda, or cuda:1 for the second GPU")
	return c
}

// open opens the device.
func (c *deviceChoice) open() (device.Device, error) { return c.watched(nil) }

// watched opens the device. It reports what it does to o, which may be nil.
func (c *deviceChoice) watched(o device.Observer) (device.Device, error) {
	if c.backend == "cuda" {
		return openCUDA(cuda.Options{Ordinal: c.ordinal, Assist: nccl.Assist(blas.New), Shareable: c.shared, Observe: o})
	}
	return openCPU(o)
}

// The functions below return an interface that is nil if opening fails, not one that
// holds a nil pointer.

func openCPU(o device.Observer) (device.Device, error) {
	d, err := cpu.Open(cpu.Options{Observe: o})
	if err != nil {
		return nil, err
	}
	return d, nil
}

// openGPU opens a GPU for the doctor, with the library that does products in training.
func openGPU(ordinal int) (device.Device, error) {
	return openCUDA(cuda.Options{Ordinal: ordinal, Assist: blas.New})
}

// openCUDA opens a GPU that leaves copies in graphs to the driver, because "bench copy"
// compares the driver's copy node with our kernel.
func openCUDA(o cuda.Options) (device.Device, error) {
	d, err := cuda.Open(o)
	if err != nil {
		return nil, err
	}
	return d, nil
}
