// This file owns metrics as such: values by their labels, and the text in which Prometheus
// reads them.

package live

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// family is the values of one metric, by their labels.
type family struct {
	kind, name, help string
	labels           []string
	series           map[string]*value // by the text of the labels
}

// value is a number. That of a histogram is a sum, with the counts of what was added.
type value struct {
	number float64
	counts []uint64 // of those up to each bound, and of all
}

// stepBounds are those of histograms, in seconds: from a millisecond, for the smallest models,
// by factors of 2 to half an hour (0.001 * 2^21 s = 35 min).
var stepBounds = func() (b []float64) {
	for s := 0.001; len(b) < 22; s *= 2 {
		b = append(b, s)
	}
	return b
}()

func newFamily(kind, name, help string, labels []string) *family {
	return &family{kind, name, help, labels, map[string]*value{}}
}

// of returns the value with some labels, which are in the order of the family's.
func (f *family) of(labels ...string) *value {
	var each []string
	for i, l := range labels {
		each = append(each, f.labels[i]+`="`+quoted.Replace(strings.ToValidUTF8(l, "\ufffd"))+`"`)
	}
	slices.Sort(each)
	key := strings.Join(each, ",")
	if f.series[key] == nil {
		f.series[key] = &value{}
	}
	return f.series[key]
}

var quoted = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

func (v *value) set(x float64) { v.number = x }
func (v *value) add(x float64) { v.number += x }

// observe adds to a histogram.
func (v *value) observe(x float64) {
	if v.counts == nil {
		v.counts = make([]uint64, len(stepBounds)+1)
	}
	v.number += x
	for i, most := range stepBounds {
		if x <= most {
			v.counts[i]++
		}
	}
	v.counts[len(stepBounds)]++
}

// write writes the families that have values.
func write(b *strings.Builder, all []*family) {
	line := func(words ...string) { b.WriteString(strings.Join(words, "") + "\n") }
	for _, f := range slices.SortedFunc(slices.Values(all), func(x, y *family) int { return cmp.Compare(x.name, y.name) }) {
		if len(f.series) == 0 {
			continue
		}
		line("# HELP ", f.name, " ", f.help)
		line("# TYPE ", f.name, " ", f.kind)
		for _, labels := range slices.Sorted(maps.Keys(f.series)) {
			v := f.series[labels]
			if f.kind != "histogram" {
				line(f.name, "{", labels, "} ", decimal(v.number))
				continue
			}
			for i, n := range v.counts {
				bound := "+Inf"
				if i < len(stepBounds) {
					bound = decimal(stepBounds[i])
				}
				line(f.name, "_bucket{", labels, `,le="`, bound, `"} `, strconv.FormatUint(n, 10))
			}
			line(f.name, "_sum{", labels, "} ", decimal(v.number))
			line(f.name, "_count{", labels, "} ", strconv.FormatUint(v.counts[len(stepBounds)], 10))
		}
	}
}

func decimal(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }
