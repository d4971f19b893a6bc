// This file owns the report as people read it.

package doctor

import (
	"fmt"
	"io"
	"strings"

	"github.com/stowage-dev/stowage/internal/profile"
	"github.com/stowage-dev/stowage/internal/sysinfo"
)

// Text prints the report. Lines stand in a fixed order and columns are aligned
// by hand, so that two machines can be compared with diff.
func (r *Report) Text(w io.Writer) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "  %-10s  %s\n", name, fmt.Sprintf(format, args...))
	}
	fmt.Fprintf(w, "%s\n\nmachine\n", r.Version)
	r.machineText(line)

	fmt.Fprint(w, "\nlauncher\n")
	r.launcherText(line)

	fmt.Fprint(w, "\ndevices\n")
	for _, d := range r.Devices {
		d.text(line)
	}

	fmt.Fprint(w, "\nlibraries\n")
	for _, l := range r.Libraries {
		switch {
		case l.Path != "":
			line(l.Name, "%s", strings.TrimSpace(l.Version+"  "+l.Path))
		case l.Trouble != "":
			line(l.Name, "does not load")
		default:
			line(l.Name, "not found")
		}
	}

	if len(r.Missing) == 0 {
		fmt.Fprint(w, "\nnothing is missing\n")
		return
	}
	fmt.Fprint(w, "\nmissing\n")
	for _, m := range r.Missing {
		fmt.Fprintf(w, "  %s: %s; %s\n", m.What, m.Why, m.Do)
	}
}

func (r *Report) machineText(line func(name, format string, args ...any)) {
	cpu, mem := r.Machine.CPU, r.Machine.Memory
	line("cpu", "%s, %s", orUnknown(cpu.Model), cpu.Arch)
	if cpu.Quota > 0 {
		line("threads", "%d, of which the control group grants the time of %.3g", cpu.Threads, cpu.Quota)
	} else {
		line("threads", "%d", cpu.Threads)
	}
	line("features", "%s", featureText(cpu.Features))
	line("memory", "%v, of which %v are available", mem.Total, mem.Available)
	if mem.Limit > 0 {
		line("limit", "%v by control group %s, of which %v are left", mem.Limit, mem.Cgroup, mem.Headroom)
	} else {
		line("limit", "none")
	}
}

func featureText(fs []sysinfo.Feature) string {
	var has, lacks []string
	for _, f := range fs {
		if f.Has {
			has = append(has, f.Name)
		} else {
			lacks = append(lacks, f.Name)
		}
	}
	s := strings.Join(has, " ")
	if s == "" {
		s = "none that Stowage has code for"
	}
	if len(lacks) > 0 {
		s += " (without " + strings.Join(lacks, " ") + ")"
	}
	return s
}

func (d Device) text(line func(name, format string, args ...any)) {
	about := []string{d.Model}
	if d.Capability != "" {
		about = append(about, "compute capability "+d.Capability, "driver "+d.Driver)
	}
	if d.Slot != "" {
		about = append(about, d.Slot)
	}
	if d.Free > 0 {
		line(d.Name, "%s; %v of %v free", strings.Join(about, ", "), d.Free, d.Total)
	} else {
		line(d.Name, "%s; %v", strings.Join(about, ", "), d.Total)
	}
	if d.Link == nil {
		line("", "copies could not be measured; see below")
		return
	}
	line("", "copies of %v: out %.1f GB/s, in %.1f GB/s, both %.1f GB/s", d.Link.Size, d.Link.Out, d.Link.In, d.Link.Both)
	line("", "inside device memory %.1f GB/s read plus write", d.Link.Local)
	if p := d.Products; p != nil {
		line("", "products of %d x %d x %d: bf16 %s, fp32 %s", p.Size, p.Size, p.Size, profile.Rate(p.BF16), profile.Rate(p.F32))
	}
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}
