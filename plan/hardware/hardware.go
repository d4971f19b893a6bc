// Package hardware holds the figures of accelerators that the planner needs: memory,
// arithmetic speed by number format, and the bandwidth of links. [ByName] returns a
// built-in accelerator, and [Parse] reads a JSON file of the same form. The built-in
// files in data name their sources.
package hardware

// This file owns the figures and how they are read.

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
)

// GPU describes one accelerator and its links.
type GPU struct {
	Name string `json:"name"` // "h100"
	// Memory is the device's memory in bytes. Usable is what is left of it for a
	// framework's allocator beside context, communication buffers and handles.
	Memory memory.Bytes `json:"memory_bytes"`
	Usable memory.Bytes `json:"usable_bytes"`
	// Free is what was measured to be free of Memory, and Usable and NodeMemory follow from
	// the measurement. It is zero if nothing was measured.
	Free memory.Bytes `json:"-"`
	// Flops is the dense arithmetic peak in operations per second, by format: "bf16",
	// "fp8", "mxfp8" or "nvfp4".
	Flops map[string]float64 `json:"flops"`
	// Bandwidths of one GPU in bytes per second: its memory, the two directions of the
	// host link, the fast links between GPUs, and the network.
	HBM       float64 `json:"hbm"`
	HostOut   float64 `json:"host_out"`
	HostIn    float64 `json:"host_in"`
	HostBoth  float64 `json:"host_both"` // sum of both directions at once
	FastLink  float64 `json:"fast_link"`
	FastGroup int     `json:"fast_group"` // GPUs that reach each other over it
	Network   float64 `json:"network"`
	// NodeGPUs is how many GPUs a node has, and NodeMemory its main memory in bytes. Both
	// are zero if they are not known.
	NodeGPUs   int          `json:"node_gpus"`
	NodeMemory memory.Bytes `json:"node_memory_bytes"`
	// Watts is the limit of its power. It is zero if it is not known.
	Watts float64 `json:"watts"`
	// Exponentials is how many exponentials it computes in a second. Zero stands for the
	// usual number of its generation.
	Exponentials float64 `json:"exponentials"`
	// Generation is the major number of the compute capability. It is zero for
	// accelerators that are not NVIDIA's.
	Generation int    `json:"generation"`
	Source     string `json:"source"`
}

//go:embed data/*.json
var files embed.FS

// formats are the keys that Flops may have.
var formats = []string{"bf16", "fp8", "mxfp8", "nvfp4"}

// aliases are other names of devices that users write.
var aliases = map[string]string{
	"v6e": "tpu-v6e", "trillium": "tpu-v6e",
	"v7x": "tpu-v7x", "tpu7x": "tpu-v7x", "ironwood": "tpu-v7x",
	"mi300": "mi300x",
}

// Names returns the names of the built-in accelerators.
func Names() []string {
	entries, err := files.ReadDir("data")
	if err != nil {
		panic("hardware: the data files are not embedded: " + err.Error())
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".json"))
	}
	return names
}

// ByName returns a built-in accelerator by a name as people write it: "h100", "GB200",
// "H100-80GB (DGX)", "NVIDIA A100-SXM4-80GB". It returns an error if it finds none,
// if the name is a list, or if it states another size of memory.
func ByName(name string) (*GPU, error) {
	if strings.ContainsAny(name, `/\`) {
		return nil, fmt.Errorf("%q is the path of no JSON file; give a file whose name ends with .json, or the name of built-in hardware, such as h100", name)
	}
	tokens := strings.FieldsFunc(strings.ToLower(name), func(c rune) bool { return !unicode.IsLetter(c) && !unicode.IsDigit(c) })
	known := Names()
	found := ""
	for _, t := range tokens {
		if full, ok := aliases[t]; ok {
			t = full
		}
		if slices.Contains(known, t) {
			found = t
			break
		}
	}
	if found == "" {
		return nil, fmt.Errorf("no built-in hardware is named %q; choose from %s, or give a JSON file with its figures", name, strings.Join(known, ", "))
	}
	if isList(name) {
		return nil, fmt.Errorf("%q names several; give one of them, such as %s", name, found)
	}
	data, err := files.ReadFile("data/" + found + ".json")
	if err != nil {
		panic("hardware: the data files are not embedded: " + err.Error())
	}
	gpu, err := Parse(data)
	if err != nil {
		return nil, err
	}
	return gpu, checkSize(name, tokens, gpu)
}

// isList reports whether a name is a list, such as "h100,h200". Behind the commas of a
// description are spaces.
func isList(name string) bool {
	_, rest, found := strings.Cut(name, ",")
	return found && !strings.HasPrefix(rest, " ")
}

// checkSize returns an error if a name states another size of memory, such as "A100-40GB",
// because the built-in figures are for the usual size. Gigabytes of vendors lie between
// 10^9 and 2^30 bytes, so a difference of an eighth is accepted.
func checkSize(name string, tokens []string, gpu *GPU) error {
	for _, t := range tokens {
		digits, ok := strings.CutSuffix(t, "gb")
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(digits, 64)
		if have := float64(gpu.Memory) / 1e9; err == nil && math.Abs(n/have-1) > 0.125 {
			return fmt.Errorf("%q has another size than the built-in %s, which has %.0f GB; give a JSON file with its figures", name, gpu.Name, have)
		}
	}
	return nil
}

// defaultReserve is what context, libraries and communicators use of a device whose file
// does not say.
const defaultReserve = 5 << 30

// Parse reads the figures of an accelerator from JSON. It returns an error for unknown
// keys, missing figures and negative ones.
func Parse(data []byte) (*GPU, error) {
	var g GPU
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&g); err != nil {
		return nil, fmt.Errorf("hardware file: %s; the keys are %s", sentence(err), strings.Join(keys(), ", "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("hardware file: more follows after the object; keep one object")
	}
	for _, k := range input.JSONKeys(data, "") { // the decoder takes them in capital letters, too
		if !slices.Contains(keys(), k.Name) {
			return nil, fmt.Errorf("hardware file: unknown key %.40q; the keys are %s", k.Name, strings.Join(keys(), ", "))
		}
	}
	for _, table := range []string{"", "flops"} {
		if err := input.Contradiction(input.JSONKeys(data, table)); err != nil {
			return nil, fmt.Errorf("hardware file: %w", err)
		}
	}
	if err := g.check(); err != nil {
		return nil, fmt.Errorf("hardware file: %w", err)
	}
	return &g, nil
}

// sentence says what is wrong in words of the file, not of this program.
func sentence(err error) string {
	var typed *json.UnmarshalTypeError
	switch {
	case errors.As(err, &typed) && typed.Field == "":
		return fmt.Sprintf("expected an object, got %s", typed.Value)
	case errors.As(err, &typed) && strings.HasPrefix(typed.Value, "number ") && typed.Type.Kind() != reflect.String:
		want := "a number that is not too large"
		if typed.Type.Kind() != reflect.Float64 {
			want = "a whole number in digits"
			if strings.Trim(typed.Value, "number 0123456789") == "" {
				want = "a whole number below 2^63"
			}
		}
		return fmt.Sprintf("%q is %.40s; it must be %s", typed.Field, strings.TrimPrefix(typed.Value, "number "), want)
	case errors.As(err, &typed):
		return fmt.Sprintf("%q has the wrong kind of value (%s)", typed.Field, typed.Value)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "it ends too early"
	}
	return input.Plain(err).Error()
}

// keys returns the names that a file may have.
func keys() []string {
	var m map[string]any
	text, err := json.Marshal(GPU{})
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	if err != nil {
		panic("hardware: a GPU does not marshal: " + err.Error())
	}
	return slices.Sorted(maps.Keys(m))
}

// mostRate bounds all figures, so that times can be counted.
const mostRate = 1e30

// check returns an error for impossible figures, and sets those that follow from others.
func (g *GPU) check() error {
	if g.Name == "" {
		return fmt.Errorf(`"name" is missing`)
	}
	for _, f := range []struct {
		key   string
		value float64
		need  bool
	}{
		{"memory_bytes", float64(g.Memory), true},
		{"usable_bytes", float64(g.Usable), false},
		{"hbm", g.HBM, true},
		{"host_out", g.HostOut, true},
		{"host_in", g.HostIn, true},
		{"host_both", g.HostBoth, false},
		{"fast_link", g.FastLink, false},
		{"fast_group", float64(g.FastGroup), false},
		{"network", g.Network, false},
		{"node_gpus", float64(g.NodeGPUs), false},
		{"node_memory_bytes", float64(g.NodeMemory), false},
		{"watts", g.Watts, false},
		{"exponentials", g.Exponentials, false},
		{"generation", float64(g.Generation), false},
	} {
		if f.value < 0 {
			return fmt.Errorf("%q is %g; it must not be negative", f.key, f.value)
		}
		if f.need && f.value == 0 {
			return fmt.Errorf("%q is missing or zero; it must be positive", f.key)
		}
		if f.value > 0 && !(f.value >= 1 && f.value <= mostRate) {
			return fmt.Errorf("%q is %g; it must be a number from 1 to %g", f.key, f.value, mostRate)
		}
	}
	if g.Flops["bf16"] == 0 {
		return fmt.Errorf(`"flops" has no "bf16"; it must be there and positive`)
	}
	for key, rate := range g.Flops {
		if !slices.Contains(formats, key) {
			return fmt.Errorf(`"flops" has %q; the formats are %s`, key, strings.Join(formats, ", "))
		}
		if !(rate >= 1 && rate <= mostRate) {
			return fmt.Errorf(`"flops" of %q is %g; it must be a number from 1 to %g`, key, rate, mostRate)
		}
	}
	if g.Usable == 0 {
		g.Usable = max(g.Memory-defaultReserve, g.Memory-g.Memory/4)
	}
	if g.Usable > g.Memory {
		return fmt.Errorf(`"usable_bytes" %d is more than "memory_bytes" %d`, g.Usable, g.Memory)
	}
	if g.NodeMemory > 0 && g.NodeGPUs == 0 {
		return fmt.Errorf(`"node_memory_bytes" needs "node_gpus", the number of GPUs that share it`)
	}
	if g.HostBoth == 0 {
		g.HostBoth = g.HostOut + g.HostIn
	}
	if g.HostBoth > g.HostOut+g.HostIn {
		return fmt.Errorf(`"host_both" %g is more than "host_out" and "host_in" together`, g.HostBoth)
	}
	g.FastGroup = max(g.FastGroup, 1)
	return nil
}
