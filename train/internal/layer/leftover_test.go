// This file owns what steps leave behind: nothing. Every part frees what it took, so that
// the next part of the same step can have it.

package layer

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

func TestNothingIsLeft(t *testing.T) {
	var calls strings.Builder // what each step asks of the device
	dense := &model.Dense{Width: 20, Gated: true}
	qk := *attentionLayer()
	qk.QKNorm = true
	moe := model.MoE{Experts: 4, TopK: 2, Width: 16, Gated: true, SharedWidth: 12}
	gated := moe
	gated.SharedGate = true
	mtp := tiny("mtp", model.Layer{Attention: attentionLayer(), Dense: dense})
	mtp.MTP = &model.MTP{Depth: 2, Layers: []model.Layer{{Attention: attentionLayer(), Dense: dense}}}
	for _, m := range []*model.Model{
		tiny("both", model.Layer{Attention: attentionLayer(), Dense: dense}),
		tiny("in parts", model.Layer{Attention: attentionLayer(), Dense: dense}),
		tiny("qk norm", model.Layer{Attention: &qk}),
		tiny("moe", model.Layer{Attention: attentionLayer(), MoE: &moe}),
		tiny("gated", model.Layer{MoE: &gated}),
		mtp, mambaModel(), latentModel(nil),
	} {
		for _, rows := range []Rows{Exact, Padded, Stashed} {
			if m.Layers[0].MoE == nil && rows != Exact {
				continue
			}
			for _, number := range []kernels.Number{kernels.F32, kernels.BF16} {
				parts := m.Name == "in parts"
				t.Run(fmt.Sprint(m.Name, rows, number), func(t *testing.T) {
					o := rigOptions{number: number, rows: rows, logged: true}
					if parts {
						o.seq = 150
					}
					r := newRig(t, m, o)
					if parts { // logits of 64 rows at a time, and gradients of all
						r.chunk.last.logitsRoom = 1
					}
					for _, phase := range []memory.Phase{memory.Train, memory.Evaluate, memory.Train} {
						left := memory.Bytes(-1)
						r.log.Take()
						ok(t, r.rt.Step(memory.Key{Microbatches: 1, Phase: phase}, func(st *engine.Step) error {
							return Guard(func() {
								p := Pass{Step: st, S: r.s, Shape: r.env.Shape, Evaluate: phase == memory.Evaluate}
								for range 2 { // two sequences of passes, as a step of two microbatches has them
									r.chunk.Forward(p, r, r.tokens, Mat{})
									if !p.Evaluate {
										r.chunk.Backward(p, r, r.tokens, Mat{})
									}
									p.Microbatch++
								}
								left = st.SavedBytes()
							})
						}))
						fmt.Fprintf(&calls, "%s, rows %d, numbers %d, phase %v: %s\n", m.Name, rows, number, phase, r.log.Take())
						if left != 0 {
							t.Errorf("a step of phase %v leaves %d bytes", phase, left)
						}
					}
				})
			}
		}
	}
	golden.Check(t, "calls.txt", calls.String())
}

// Every norm of every kind of layer has the epsilon of the settings.
func TestEpsilonOfAllNorms(t *testing.T) {
	for _, name := range []string{"tiny-moe", "tiny-deepseek", "tiny-dense", "tiny-hybrid"} {
		m, err := model.Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		r := newRig(t, m, rigOptions{settings: func(s *Settings) { s.Epsilon = 0.25 }})
		seen, norms := map[uintptr]bool{}, 0
		var walk func(v reflect.Value)
		walk = func(v reflect.Value) {
			switch v.Kind() {
			case reflect.Pointer, reflect.Interface:
				if v.IsNil() || v.Kind() == reflect.Pointer && (seen[v.Pointer()] || !strings.HasSuffix(v.Type().Elem().PkgPath(), "train/internal/layer")) {
					return
				}
				if v.Kind() == reflect.Pointer {
					seen[v.Pointer()] = true
				}
				walk(v.Elem())
			case reflect.Slice:
				for i := range v.Len() {
					walk(v.Index(i))
				}
			case reflect.Struct:
				if v.Type() == reflect.TypeFor[norm]() {
					norms++
					if e := v.FieldByName("epsilon").Float(); e != 0.25 {
						t.Errorf("%s: a norm has the epsilon %g", name, e)
					}
				}
				for i := range v.NumField() {
					walk(v.Field(i))
				}
			}
		}
		walk(reflect.ValueOf(r.chunk))
		if norms < len(m.Layers) {
			t.Errorf("%s: %d norms in %d layers", name, norms, len(m.Layers))
		}
	}
}
