// This file owns the description of the machine's GPUs, for people.

package cuda

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// GPU describes one GPU of the machine.
type GPU struct {
	Ordinal    int          `json:"ordinal"`
	Name       string       `json:"name"`
	Capability string       `json:"capability"`
	Driver     string       `json:"driver"`
	Total      memory.Bytes `json:"total"`
	Free       memory.Bytes `json:"free"`
	PCI        string       `json:"pci"`            // "0000:17:00.0"
	Link       string       `json:"link,omitempty"` // "32.0 GT/s PCIe x16", where the system tells
	// Trouble says why the free memory is unknown at the moment, or is empty. Problem
	// says why Open can never use the GPU, or is empty.
	Trouble string `json:"trouble,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// Count returns the number of GPUs. It returns a [device.Unsupported] if there is no
// working driver.
func Count() (int, error) {
	v, err := openDriver(libraries)
	if err != nil {
		return 0, err
	}
	return v.count(), nil
}

// List describes the GPUs. To read the free memory of one it makes a context on that GPU
// for a moment; if that fails, GPU.Trouble says why. List returns a
// [device.Unsupported] if there is no working driver.
func List() ([]GPU, error) {
	v, err := openDriver(libraries)
	if err != nil {
		return nil, err
	}
	var gpus []GPU
	for i := range v.count() {
		gpu, err := v.gpuHandle(i)
		if err != nil {
			return gpus, err
		}
		gpus = append(gpus, v.describe(i, gpu))
	}
	return gpus, nil
}

func (v *driver) count() int {
	var n int32
	v.callPtr(&v.deviceGetCount, uintptr(pointer(&n)))
	return int(n)
}

func (v *driver) describe(ordinal int, gpu int32) GPU {
	g := GPU{
		Ordinal: ordinal, Name: v.name(gpu), Driver: versionString(v.version), Total: v.total(gpu),
		Capability: fmt.Sprintf("%d.%d", v.attribute(gpu, attrMajor), v.attribute(gpu, attrMinor)),
		PCI:        fmt.Sprintf("%04x:%02x:%02x.0", v.attribute(gpu, attrPCIDomain), v.attribute(gpu, attrPCIBus), v.attribute(gpu, attrPCIDevice)),
	}
	g.Problem, _ = v.unusable(gpu)
	g.Link = pciLink(os.DirFS("/sys/bus/pci/devices"), g.PCI)
	var ctx, free, total uint64
	r := v.callPtr(&v.primaryCtxRetain, uintptr(pointer(&ctx)), uintptr(gpu))
	if r == success {
		v.within(uintptr(ctx), func() { r = v.callPtr(&v.memGetInfo, uintptr(pointer(&free)), uintptr(pointer(&total))) })
		v.call(&v.primaryCtxRelease, uintptr(gpu))
	}
	if r != success {
		g.Trouble = "its free memory is not known: " + v.text(r)
	}
	g.Free = memory.Bytes(free)
	return g
}

// minMajor is the compute capability that the kernels' PTX needs, 8.0.
const minMajor = 8

// unusable returns why a GPU cannot be used and what to do, or two empty strings if it
// can.
func (v *driver) unusable(gpu int32) (why, need string) {
	major, minor := v.attribute(gpu, attrMajor), v.attribute(gpu, attrMinor)
	switch {
	case major < minMajor:
		return fmt.Sprintf("the GPU has compute capability %d.%d, and the kernels are made for 8.0 and later", major, minor),
			"use a GPU of compute capability 8.0 or later (A100 or newer)"
	case v.attribute(gpu, attrVirtualMemory) == 0:
		return "the GPU or its driver has no virtual memory management", "use the GPU outside of modes that take it away"
	}
	return "", ""
}

// pciLink reads the speed of a link from the system, for example "32.0 GT/s PCIe" and
// "16". Virtual machines often give nothing, or "Unknown" and "0".
func pciLink(devices fs.FS, address string) string {
	read := func(name string) string {
		b, err := fs.ReadFile(devices, path.Join(address, name))
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	speed, width := read("current_link_speed"), read("current_link_width")
	if !strings.Contains(speed, "GT/s") || width == "" || width == "0" {
		return ""
	}
	return speed + " x" + width
}

// attribute returns an attribute of a GPU, or zero if the driver does not know it.
func (v *driver) attribute(gpu int32, which int) int {
	var n int32
	if v.callPtr(&v.deviceGetAttribute, uintptr(pointer(&n)), uintptr(which), uintptr(gpu)) != success {
		return 0
	}
	return int(n)
}

func (v *driver) name(gpu int32) string {
	var name [256]byte
	if v.callPtr(&v.deviceGetName, uintptr(pointer(&name[0])), uintptr(len(name)-1), uintptr(gpu)) != success {
		return "unknown GPU"
	}
	s, _, _ := bytes.Cut(name[:], []byte{0})
	return string(s)
}

func (v *driver) total(gpu int32) memory.Bytes {
	var n uint64
	v.callPtr(&v.deviceTotalMem, uintptr(pointer(&n)), uintptr(gpu))
	return memory.Bytes(n)
}
