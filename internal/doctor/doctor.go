// Package doctor looks at a machine and says what Stowage finds there, what is
// missing, and the sentence that mends it. Nothing it misses is an error:
// Stowage runs on any CPU.
//
// This file owns the report and how it is put together; libraries.go finds
// shared libraries, launch.go says what started the process, text.go prints.
package doctor

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
)

// Report is what the doctor found.
type Report struct {
	Version   string          `json:"version"`
	Machine   sysinfo.Machine `json:"machine"`
	Launcher  *Launch         `json:"launcher,omitempty"` // what started this process, unless it was started alone
	Devices   []Device        `json:"devices"`            // the CPU first, then GPUs by number
	Libraries []Library       `json:"libraries"`
	Missing   []Missing       `json:"missing"`

	unclear bool // whether the launcher's variables make no sense
}

// Device is one device, with the speed of its link if it could be measured.
type Device struct {
	Name       string       `json:"name"` // "cpu:0", "cuda:1"
	Model      string       `json:"model"`
	Capability string       `json:"capability,omitempty"`
	Driver     string       `json:"driver,omitempty"`
	Total      memory.Bytes `json:"total"`
	Free       memory.Bytes `json:"free"`
	Slot       string       `json:"slot,omitempty"` // what the GPU is plugged into
	Link       *Link        `json:"link,omitempty"`
	Products   *Products    `json:"products,omitempty"`
}

// Link is the speed of copies between device memory and host memory in
// gigabytes a second; Local is that of copies inside device memory, counted
// read plus write.
type Link struct {
	Size  memory.Bytes `json:"size"`
	Out   float64      `json:"out_gbps"`
	In    float64      `json:"in_gbps"`
	Both  float64      `json:"both_gbps"`
	Local float64      `json:"device_gbps"`
}

// Products is the rate of dense products of square matrices in TFLOP/s, with the library
// that the device has for them or else with our own kernels. `stowage train --profile`
// compares kernels with it.
type Products struct {
	Size int     `json:"size"`
	BF16 float64 `json:"bf16_tflops"`
	F32  float64 `json:"fp32_tflops"`
}

// Missing is something that the machine lacks, and how to provide it.
type Missing struct {
	What string `json:"what"`
	Why  string `json:"why"`
	Do   string `json:"do"`
}

// Probe reads the machine. Tests replace its functions.
type Probe struct {
	Version   string
	Machine   func() sysinfo.Machine
	Place     func() (*launcher.Place, error)
	OpenCPU   func() (device.Device, error)
	GPUs      func() ([]cuda.GPU, error)
	OpenGPU   func(ordinal int) (device.Device, error)
	Libraries func() []Library
	Bench     bench.Options
	Progress  func(done, all int) // told after each device; nil means nobody
}

// linkSize is large enough for full speed (64 MiB over 55 GB/s, what
// `stowage bench copy --device cuda` gives on an H200, take 1.2 ms) and small enough for any machine: four buffers take 256 MiB.
const linkSize = 64 * memory.MiB

// LinkBench returns the options for links: the four lines of a device take about
// one second.
func LinkBench() bench.Options { return bench.Options{Line: 250 * time.Millisecond} }

// Examine makes the report.
func Examine(p Probe) *Report {
	r := &Report{
		Version: p.Version, Machine: p.Machine(),
		Devices: []Device{}, Libraries: []Library{}, Missing: []Missing{}, // JSON lists, never null
	}
	list, err := p.GPUs()
	tell := func(done int) {
		if p.Progress != nil {
			p.Progress(done, 1+len(list))
		}
	}
	r.examineCPU(p)
	tell(1)
	gpus := r.examineGPUs(p, list, err, tell)
	r.Libraries = append(r.Libraries, p.Libraries()...)
	for _, l := range r.Libraries {
		if l.Path != "" {
			continue
		}
		m := Missing{What: l.Name, Why: "not found; it would serve " + l.For, Do: l.Install}
		if l.Trouble != "" {
			m.Why = "found, but it does not load: " + l.Trouble
		}
		if l.NeedsGPU && gpus == 0 {
			m.Do = "nothing to do without a GPU"
		}
		r.Missing = append(r.Missing, m)
	}
	r.examineLauncher(p, gpus)
	return r
}

func (r *Report) miss(what, why, do string) {
	r.Missing = append(r.Missing, Missing{what, why, do})
}

func (r *Report) examineCPU(p Probe) {
	if m := r.Machine.Memory; m.Limit > 0 && m.Headroom < bench.Footprint(linkSize) {
		r.miss("memory", fmt.Sprintf("the control group leaves %v of %v", m.Headroom, m.Limit),
			"raise the container's memory limit or end what else runs in it")
		return
	}
	d := Device{
		Name: "cpu:0", Model: fmt.Sprintf("the CPU as a device, %d threads", r.Machine.CPU.Threads),
		Total: r.Machine.Memory.Total, Free: r.Machine.Memory.Usable(),
	}
	dev, err := p.OpenCPU()
	if err == nil {
		d.Link, d.Products, err = measure(dev, p.Bench)
	}
	if err != nil {
		r.failed(d.Name, err)
	}
	r.Devices = append(r.Devices, d)
}

// examineGPUs returns how many GPUs there are. It tells how many devices have been examined.
func (r *Report) examineGPUs(p Probe, gpus []cuda.GPU, err error, tell func(int)) int {
	if err != nil {
		r.failed("GPU", err)
	}
	for i, g := range gpus {
		d := Device{
			Name: fmt.Sprintf("cuda:%d", g.Ordinal), Model: g.Name, Capability: g.Capability, Driver: g.Driver,
			Total: g.Total, Free: g.Free, Slot: g.Link,
		}
		if g.Problem != "" {
			r.miss(d.Name, g.Problem, "use another GPU, or the CPU as a device, which works everywhere")
		} else if g.Trouble != "" {
			r.miss(d.Name, g.Trouble, "see what else holds the GPU (nvidia-smi)")
		} else if dev, err := p.OpenGPU(g.Ordinal); err != nil {
			r.failed(d.Name, err)
		} else if d.Link, d.Products, err = measure(dev, p.Bench); err != nil {
			r.failed(d.Name, err)
		}
		r.Devices = append(r.Devices, d)
		tell(i + 2)
	}
	return len(gpus)
}

// failed adds an entry for an error. Typed errors say what to do themselves.
func (r *Report) failed(what string, err error) {
	var unsupported *device.Unsupported
	var full *device.OutOfMemory
	why := strings.TrimPrefix(err.Error(), what+": ")
	switch {
	case errors.As(err, &unsupported):
		r.miss(unsupported.What, unsupported.Why, unsupported.Need)
	case errors.As(err, &full):
		r.miss(what, why, fmt.Sprintf("end what else uses its %s memory", full.Kind))
	default:
		r.miss(what, why, "run this again, and if it stays so, see what the system log says")
	}
}

// measure times the link and the products of an open device and closes it.
func measure(dev device.Device, o bench.Options) (*Link, *Products, error) {
	l := &Link{Size: linkSize}
	speeds := map[bench.Direction]*float64{bench.Out: &l.Out, bench.In: &l.In, bench.Both: &l.Both, bench.Device: &l.Local}
	ds := []bench.Direction{bench.Out, bench.In, bench.Both, bench.Device}
	err := bench.Copies(dev, o, linkSize, ds, func(c bench.Copy) error {
		*speeds[c.Direction] = c.GBps
		return nil
	})
	p := &Products{Size: bench.ProductSize(dev)}
	if err == nil {
		p.BF16, err = bench.Product(dev, kernels.BF16, p.Size)
	}
	if err == nil {
		p.F32, err = bench.Product(dev, kernels.F32, p.Size)
	}
	if cerr := dev.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return nil, nil, err
	}
	return l, p, nil
}
